"""A replay simulated in one pass equals a run in two: the prompt and its last window, then the rest (SPEC 16)."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_dsv41.modules.hyper_connection import open_streams
from megatron_dsv41.modules.layout import to_flat
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import Transformer, make_batch, one_document_per_row
from megatron_dsv41.ops.documents import Groups
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.testing.tiny import identity_map, tiny_config, tiny_model

TOTAL = 21


class Cached(TorchPrimitives):
    """Keeps what an inference server keeps between passes: window KV rows and compressed entries, per layer."""

    def __init__(self, config, ops):
        super().__init__(config, ops, dense_experts=True)
        self.rows, self.entries, self.layer, self.calls, self.keep_entries = {}, {}, 0, 0, False

    def enter(self, layer):
        self.layer, self.calls = layer, 0

    def left_halo(self, x_TD, rows):
        self.calls += 1
        key = (self.layer, rows)
        before = self.rows.get(key, x_TD.new_zeros(0, *x_TD.shape[1:]))
        known = torch.cat([x_TD.new_zeros(rows, *x_TD.shape[1:]), before])
        self.rows[key] = torch.cat([before, x_TD])
        return torch.cat([known[known.shape[0] - rows :], x_TD])

    def gather_groups(self, x_CD, groups):
        self.calls += 1
        key = (self.layer, self.calls)
        if not self.keep_entries:
            self.entries[key] = torch.cat([self.entries[key], x_CD]) if key in self.entries else x_CD
        return self.entries[key]


def part(config, whole, begin, end, decoder_start=0):
    """The batch of tokens [begin, end) of one document, decoder windows starting at `decoder_start` or later."""
    window = config.sliding_window
    oldest = torch.maximum(whole.window_start_T, torch.tensor(decoder_start))
    groups, seen = {}, {}
    for ratio, entries in whole.entries.items():
        last = entries.token_C + ratio - 1
        mine = entries.valid_C & (last >= begin) & (last < end)
        groups[ratio] = Groups(ratio, entries.token_C[mine] - begin + ratio - 1, entries.position_C[mine])
        count = int((entries.valid_C & (last < end)).sum())  # those that exist by then
        entries_C = {name: getattr(entries, name)[:count] for name in ("token_C", "position_C", "valid_C")}
        rows_T = {name: getattr(entries, name)[begin:end] for name in ("first_T", "num_visible_T")}
        seen[ratio] = dataclasses.replace(entries, **entries_C, **rows_T)
    return dataclasses.replace(
        whole,
        documents=whole.documents.rows(begin, end),
        entries=seen,
        groups=groups,
        engram_rows={layer: rows[begin:end] for layer, rows in whole.engram_rows.items()},
        gate_open_T=whole.gate_open_T[begin:end],
        window_start_T=whole.window_start_T[begin:end] - (begin - window + 1),
        decoder_window_start_T=oldest[begin:end] - (begin - window + 1),
    )


def run_blocks(model, layers, streams, pre, state, batch):
    for layer in layers:
        model.layers[layer].attn.primitives.enter(layer)
        streams, pre, state, _ = model.layers[layer](streams, pre, state, batch)
    return streams, pre


def head(model, streams, pre):
    hidden = model.norm(model.ops["mhc.collapse"](streams, pre))
    return model.head(hidden).transpose(0, 1)


@torch.no_grad()
def two_passes(model, ids, prompt, start):
    """Logits of tokens start .. TOTAL - 1 as inference computes them."""
    config, decoder = model.config, model.config.decoder_start
    primitives = model.layers[0].attn.primitives
    encoder_layers, decoder_layers = range(decoder), range(decoder, config.num_hidden_layers)
    whole = make_batch(config, model.engram_hash, ids, one_document_per_row(config, ids))
    embedded = model.embed(ids).transpose(0, 1)
    opened = open_streams(embedded, config.hc_mult)

    # The prompt: all of it through the encoder and the decoder's compressor, its last window through the decoder.
    batch = part(config, whole, 0, prompt)
    streams, pre = run_blocks(model, encoder_layers, *(t[:prompt] for t in opened), SharedState(), batch)
    first = model.layers[decoder]
    primitives.enter(decoder)
    first.attn._compress(to_flat(first.attn_norm(model.ops["mhc.collapse"](streams, pre))), batch)
    primitives.keep_entries = True
    replayed = part(config, whole, start, prompt, decoder_start=start)
    before = head(model, *run_blocks(model, decoder_layers, streams[start:], pre[start:], SharedState(), replayed))
    primitives.keep_entries = False

    # The rest, on what was kept.
    batch = part(config, whole, prompt, ids.shape[1])
    streams, pre = run_blocks(model, encoder_layers, *(t[prompt:] for t in opened), SharedState(), batch)
    after = head(model, *run_blocks(model, decoder_layers, streams, pre, SharedState(), batch))
    return torch.cat([before, after], dim=1)


@pytest.mark.parametrize("prompt", [8, 12, 16])
def test_one_pass_equals_two(prompt):
    config = tiny_config()
    model = Transformer(config, identity_map(config), primitives=Cached(config, Ops()))
    model.load_state_dict(tiny_model(config).state_dict())
    plain = Transformer(config, identity_map(config), primitives=TorchPrimitives(config, Ops(), dense_experts=True))
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 90, (1, TOTAL), generator=torch.Generator().manual_seed(prompt))
    start = prompt - config.sliding_window

    actual = two_passes(model, ids, prompt, start)
    with torch.no_grad():
        simulated = plain(ids, None, torch.full((TOTAL,), start)).logits[:, start:]
        unaware = plain(ids).logits[:, start:]
    torch.testing.assert_close(simulated, actual, rtol=0, atol=1e-5)
    assert (unaware - actual).abs().max() > 1e-3  # without the simulation training sees something else
    loss = [F.cross_entropy(logits[0, :-1], ids[0, start + 1 :]) for logits in (simulated, actual)]
    torch.testing.assert_close(*loss, rtol=1e-6, atol=0)
