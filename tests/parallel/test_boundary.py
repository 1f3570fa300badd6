"""The payload of every cut: exactly what is alive, bit for bit, gradients too."""

import dataclasses

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.parallel.boundary import BoundaryCodec
from megatron_dsv41.parallel.payload import CrossingPlanner, Lengths
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.tiny import tiny_config

BATCH, SEQ = 2, 7


def fields_at(config, boundary, dtype="bfloat16", index_gradient=True, batch=BATCH, seq=SEQ):
    phase = Phase(index_loss="sparse" if index_gradient else "off")
    config = dataclasses.replace(config, dtype=dtype)
    return CrossingPlanner(config, phase, Lengths.of(batch, seq)).crossing(boundary).fields


def values_of(fields):
    torch.manual_seed(0)
    values = {}
    for field in fields:
        dtype = getattr(torch, field.dtype)
        if dtype.is_floating_point:
            # fp32 values that bf16 cannot hold
            values[field.name] = torch.randn(field.shape, dtype=dtype).requires_grad_(field.has_gradient)
        else:
            values[field.name] = torch.randint(-1, 2**31 - 1, field.shape, dtype=dtype)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("boundary", range(1, 8))
def test_every_cut_is_bit_exact_both_ways(boundary, dtype):
    config = tiny_config()
    fields = fields_at(config, boundary, str(dtype).removeprefix("torch."))
    assert {f.name for f in fields} == {"streams", "pre_mix"} | live_at(plan_layers(config), boundary)
    values = values_of(fields)
    codec = BoundaryCodec(fields, dtype)
    state = {k: v for k, v in values.items() if k not in ("streams", "pre_mix")}
    packed = codec.pack(values["streams"], values["pre_mix"], SharedState(**state))
    assert packed.shape == (codec.numel,) and packed.dtype == dtype and packed._base is None

    wire = packed.detach().clone().requires_grad_()
    streams, pre_mix, arrived = codec.unpack(wire)
    received = {"streams": streams, "pre_mix": pre_mix, **{k: v for k, v in vars(arrived).items() if v is not None}}
    assert set(received) == set(values)
    for name, value in values.items():
        assert received[name].dtype == value.dtype and torch.equal(received[name], value), name

    grads = {f.name: torch.randn(f.shape, dtype=getattr(torch, f.dtype)) for f in fields if f.has_gradient}
    sum((received[name] * grad).double().sum() for name, grad in grads.items()).backward()
    back = codec.gradient_from_wire(codec.gradient_to_wire(wire.grad).clone())
    torch.autograd.backward(packed, back)
    for name, grad in grads.items():
        assert torch.equal(values[name].grad, grad), name


def test_padding_fills_up_to_one_length():
    config = tiny_config()
    fields = fields_at(config, 5)
    values = values_of(fields)
    codec = BoundaryCodec(fields, torch.bfloat16, padded_numel=100_000)
    state = SharedState(**{k: v for k, v in values.items() if k not in ("streams", "pre_mix")})
    packed = codec.pack(values["streams"], values["pre_mix"], state)
    assert packed.numel() == 100_000 and codec.padding > 0
    streams, _, arrived = codec.unpack(packed)
    assert torch.equal(streams, values["streams"]) and torch.equal(arrived.topk_indices, state.topk_indices)


def test_bytes_of_the_release():
    """Per token at 64 K: streams 40,960 bytes; latents, keys, top-k and pool of layer 20's cache beside them."""
    config, seq = presets.flash(), 65536
    bytes_at = {}
    for boundary in (2, 10, 24, 30, 38):
        fields = fields_at(config, boundary, batch=1, seq=seq, index_gradient=False)
        bytes_at[boundary] = {f.name: f.num_bytes / seq for f in fields}
    base = {"streams": 40960, "pre_mix": 16}
    assert bytes_at[2] == base
    assert bytes_at[10] == {**base, "compressed_kv": 1024, "topk_indices": 2048}
    assert bytes_at[24] == {**base, "compressed_kv": 2048, "index_keys": 256, "candidates": 8192}
    assert bytes_at[30] == {**bytes_at[24], "topk_indices": 2048}
    assert bytes_at[38] == {**base, "compressed_kv": 2048, "topk_indices": 2048}
