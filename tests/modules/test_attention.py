"""One attention site at the released width, and the pieces that tensor parallelism will cut."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.modules.attention import Attention
from megatron_dsv41.modules.primitives import GroupedLinear, TorchPrimitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import make_batch, one_document_per_row
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.rope.ref import cos_sin, rotate
from megatron_dsv41.phase import Phase
from megatron_dsv41.presets import flash
from megatron_dsv41.testing.tiny import tiny_config, tiny_model


class Spy:
    """The chosen ops; remembers the arguments and results of one of them."""

    def __init__(self, op):
        self.ops, self.op, self.calls = Ops(), op, []

    def __getitem__(self, op):
        function = self.ops[op]
        if op != self.op:
            return function

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            self.calls.append((args, kwargs, result))
            return result

        return call


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_softmax_scale_is_head_dim_alone(ratio):
    config, spy = tiny_config(), Spy("csa2.sparse_attend")
    model = tiny_model(config)
    layer = {0: 0, 2: 2, 1: 4}[ratio]
    model.layers[layer].attn.ops = spy
    model(torch.randint(0, 90, (1, 12)))
    (args, kwargs, _) = spy.calls[0]
    assert args[7] == config.head_dim**-0.5 and kwargs["window"] == config.sliding_window


@pytest.fixture(scope="module")
def wide_layer():
    """Layer 2 of the release (Full, ratio 2) with weights and inputs in real ranges: latents up to about 10."""
    config = dataclasses.replace(flash(), dtype="bfloat16", engram_layer_ids=(), engram_num_embeddings=())
    spy = Spy("csa2.sparse_attend")
    torch.manual_seed(0)
    attention = Attention(config, plan_layers(config)[2], Phase(), TorchPrimitives(config, Ops()), spy)
    with torch.no_grad():
        attention.kv_norm.weight.mul_(torch.rand(512) * 6)
        attention.compressor.norm.weight.mul_(torch.rand(512) * 6)
        attention.attn_sink.normal_(std=3)
    ids = torch.randint(0, 1000, (1, 21))
    no_engram = type("NoEngram", (), {"__call__": lambda self, ids, documents: {}})()
    batch = make_batch(config, no_engram, ids, one_document_per_row(config, ids))
    x = (torch.randn(21, 1, 5120) * 3).bfloat16()
    with torch.no_grad():
        y, state, _ = attention(x, SharedState(), batch)
    return attention, spy.calls[0], x, y, state


def test_released_width_attends_like_the_exact_sum(wide_layer):
    _, (args, kwargs, out), _, _, _ = wide_layer
    q, kv, compressed, topk, sink, start, offset, scale = args
    q = rotate(q, *kwargs["turn"])
    assert kv.abs().max() > 5 and offset == 0
    for t in (0, 1, 20):
        rows = torch.cat([kv[start[t] : t + 1].double(), compressed[topk[t][topk[t] >= 0].long()].double()])
        assert rows.shape[0] == t + 1 + (t + 1) // 2
        logits = q[t].double() @ rows.T * 512**-0.5
        weights = torch.cat([logits, sink[:, None].double()], dim=1).softmax(1)[:, :-1]
        torch.testing.assert_close(out[t].double(), weights @ rows, rtol=0.02, atol=0.02)


def test_released_width_state(wide_layer):
    _, _, _, y, state = wide_layer
    assert state.compressed_kv.shape == (10, 512) and state.compressed_kv.dtype == torch.float32
    assert state.index_keys.shape == (10, 128) and state.topk_indices.shape == (21, 10)
    assert torch.equal(state.compressed_kv, state.compressed_kv.bfloat16().float())
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


def test_output_projection_meets_its_own_heads(wide_layer):
    attention, (_, _, out), _, y, _ = wide_layer
    turn = cos_sin(torch.arange(21), attention.frequencies)
    heads = rotate(out, *turn, inverse=True)
    with torch.no_grad():
        parts = [heads[:, 8 * g : 8 * g + 8].flatten(1) @ attention.wo_a.weight.chunk(8)[g].T for g in range(8)]
        again = attention.wo_b(torch.cat(parts, dim=-1))
    torch.testing.assert_close(again, y[:, 0], rtol=0.02, atol=0.02)


class Overwriting:
    """The chosen ops, from providers that leave nothing of tensors that are given away."""

    def __init__(self):
        self.ops, self.number = Ops(), 0

    def __getitem__(self, op):
        if op not in ("csa2.sparse_attend", "rope.rotate_owned"):
            return self.ops[op]

        def call(x, *args, **kwargs):
            result = self.ops[op](x * 1, *args, **kwargs)
            x.detach().fill_(torch.nan)
            torch.autograd.graph.increment_version(x)
            self.number += 1
            return result

        return call


@pytest.mark.parametrize("index_loss", ["off", "sparse", "dense"])
@pytest.mark.parametrize("recompute", [False, True])
def test_nobody_reads_what_was_given_away(index_loss, recompute):
    """Losses, probes and gradients are those of providers that overwrite nothing, bit by bit."""

    def results(ops):
        model = tiny_model(tiny_config(), phase=Phase(index_loss=index_loss))
        for block in model.layers:
            block.attn.ops = ops
            if recompute:
                block.attn.primitives.recomputed = functools.partial(checkpoint, use_reentrant=False)
        output = model(torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0)), probes=3)
        (output.logits.square().mean() + output.aux.loss.sum()).backward()
        return output.logits, output.aux.index_quality, {name: p.grad for name, p in model.named_parameters()}

    ops = Overwriting()
    (logits, quality, grads), (plain, plain_quality, plain_grads) = results(ops), results(Ops())
    assert ops.number == (24 if recompute else 16)  # a call forward and one backward in each of eight layers
    assert torch.equal(logits, plain) and torch.equal(quality, plain_quality) and quality.any()
    for name, grad in plain_grads.items():
        assert grad is None if grads[name] is None else torch.equal(grads[name], grad), name


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_groups_can_be_cut_but_not_across(parts):
    torch.manual_seed(0)
    whole = GroupedLinear(8, 6, 3, torch.float64, 1.0)
    x = torch.randn(5, 48, dtype=torch.float64)
    expected = whole(x)
    outputs = []
    for rank in range(parts):
        piece = GroupedLinear(8 // parts, 6, 3, torch.float64, 1.0)
        piece.load_state_dict({"weight": whole.weight.chunk(parts)[rank]})
        outputs.append(piece(x.chunk(parts, dim=-1)[rank]))
    torch.testing.assert_close(torch.cat(outputs, dim=-1), expected)
    # Interleaved heads load cleanly and compute something else.
    wrong = GroupedLinear(8, 6, 3, torch.float64, 1.0)
    wrong.load_state_dict({"weight": whole.weight.unflatten(0, (8, 3)).transpose(0, 1).reshape(24, 6)})
    assert not torch.allclose(wrong(x), expected)
