"""Order of the single-pass residual: each site reads with the mix that the previous site predicted."""

import torch

from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.modules.attention import IndexReport
from megatron_dsv41.modules.block import Block
from megatron_dsv41.modules.hyper_connection import Mix, open_streams
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.modules.transformer import make_batch, one_document_per_row
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.tiny import tiny_config, tiny_model


def predict(site, pre, post, comb):
    """Let a site predict these coefficients, whatever its streams: through Mix alone, the rest stays as it is."""
    mix = Mix(*(torch.tensor(v)[None, None] for v in (pre, post, comb)))
    site.register_forward_hook(lambda module, args, output: (*output[:2], mix))


class Double(torch.nn.Module):
    """A site that returns twice its input."""

    def forward(self, x, *args):
        if len(args) == 2:
            return 2 * x, args[0], IndexReport(torch.zeros(()), torch.zeros(5))
        return 2 * x, type("R", (), {"balance_loss": torch.zeros(()), "expert_load": torch.zeros(2, 4)})()


def test_two_sites_by_hand():
    config = tiny_config(hc_mult=2)
    ops = Ops()
    block = Block(config, plan_layers(config)[0], Phase(), TorchPrimitives(config, ops), ops, frozenset())
    block.attn_norm = block.ffn_norm = torch.nn.Identity()
    block.attn, block.ffn = Double(), Double()
    predict(block.attn_hc, [3.0, 5.0], [1.0, 10.0], [[1.0, 2.0], [0.0, 1.0]])
    predict(block.ffn_hc, [7.0, 11.0], [1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]])
    streams = torch.tensor([1.0, 100.0])[None, None, :, None].expand(1, 1, 2, config.hidden_size)
    incoming = torch.tensor([[[1.0, 0.5]]])

    out, pre_mix, *_ = block(streams, incoming, SharedState(), None)

    # Attention site reads with the incoming mix: x = 1 + 50 = 51, y = 102.
    # Streams: post*y + comb from source to destination: [102 + 1, 1020 + 2*1 + 100].
    # FFN site reads with the attention site's pre: 3*103 + 5*1122 = 5919, y = 11838.
    assert out[0, 0, :, 0].tolist() == [1 * 11838 + 1122, 103]
    # What the next layer reads with is the FFN site's pre.
    assert pre_mix[0, 0].tolist() == [7.0, 11.0]
    # An unshifted variant (each site reading with its own pre) would have read 3 + 500 at the first site.
    assert out[0, 0, 0, 0].item() != 1 * 2 * (7 * (2 * 503 + 1) + 11 * (20 * 503 + 102))


def test_first_site_reads_stream_zero():
    streams, pre_mix = open_streams(torch.randn(3, 2, 8), 4)
    assert streams.shape == (3, 2, 4, 8) and (streams == streams[:, :, :1]).all()
    assert pre_mix.tolist() == [[[1.0, 0, 0, 0]] * 2] * 3


def test_final_collapse_uses_the_last_ffn_mix():
    config = tiny_config()
    model = tiny_model(config)
    ids = torch.randint(0, 90, (1, 6))
    with torch.no_grad():
        output = model(ids)
        batch = make_batch(config, model.engram_hash, ids, one_document_per_row(config, ids))
        streams, pre = open_streams(model.embed(ids).transpose(0, 1), config.hc_mult)
        state = SharedState()
        for block in model.layers:
            streams, pre, state, _ = block(streams, pre, state, batch)
        hidden = (streams * _last_mix(model, ids).pre[..., None]).sum(2)
        logits = model.head(model.norm(hidden)).transpose(0, 1)
    torch.testing.assert_close(logits, output.logits)


def _last_mix(model, ids):
    seen = {}
    hook = model.layers[-1].ffn_hc.register_forward_hook(lambda module, args, output: seen.update(mix=output[2]))
    model(ids)
    hook.remove()
    return seen["mix"]


def test_initial_mixing_keeps_streams_apart():
    config = tiny_config()
    ops = Ops()
    block = Block(config, plan_layers(config)[0], Phase(), TorchPrimitives(config, ops), ops, frozenset())
    *_, mix = block.attn_hc(torch.randn(2, 1, 4, config.hidden_size), torch.ones(2, 1, 4))
    torch.testing.assert_close(mix.pre.sum(-1), torch.ones(2, 1), rtol=0, atol=0.05)
    assert (mix.comb.diagonal(dim1=-2, dim2=-1) > 0.9).all()
