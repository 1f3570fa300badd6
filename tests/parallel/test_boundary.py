"""The payload of every cut: exactly what is alive, bit for bit, gradients too."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41 import presets
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.parallel.boundary import BoundaryCodec
from megatron_dsv41.parallel.payload import CrossingPlanner, Lengths
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny import tiny_config

BATCH, SEQ = 2, 7


def fields_at(config, boundary, dtype="bfloat16", index_gradient=True, batch=BATCH, seq=SEQ):
    phase = Phase(index_loss="sparse" if index_gradient else "off")
    config = dataclasses.replace(config, dtype=dtype)
    return CrossingPlanner(config, phase, Lengths(batch, seq)).crossing(boundary).fields


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


def check_copies_cross_once(sequence):
    """On one of 4 ranks, 2 x 2: what the ranks hold alike is sent in parts and arrives whole, gradients add up."""
    rank = dist.get_rank()
    tensor_rank, context_rank = rank % 2, rank // 2
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor, context = groups[context_rank], groups[2 + tensor_rank]
    config = dataclasses.replace(tiny_config(), dtype="bfloat16")
    planner = CrossingPlanner(
        config, Phase(index_loss="sparse"), Lengths(1, 12, context=2, tensor=2, sequence=sequence)
    )
    fields = planner.crossing(5).fields
    codec = BoundaryCodec(fields, torch.bfloat16, tensor_group=tensor, context_group=context)

    def drawn(seed, field, context_part, tensor_part):
        generator = torch.Generator().manual_seed(seed + 10 * context_part + tensor_part)
        if field.dtype == "int32":
            return torch.randint(-1, 2**31 - 1, field.shape, dtype=torch.int32, generator=generator)
        return torch.randn(field.shape, dtype=getattr(torch, field.dtype), generator=generator)

    def held(seed, field, adds=False):
        """Equal where a field has copies; with `adds`, every rank's part of the gradient's sum."""
        split = adds and field.context_copies > 1, adds and field.adds_over_tensor
        own_context = field.context_copies == 1 or split[0]
        own_tensor = field.tensor_copies == 1 or split[1]
        return drawn(seed, field, context_rank * own_context, tensor_rank * own_tensor)

    values = {field.name: held(number, field) for number, field in enumerate(fields)}
    for field in fields:
        values[field.name].requires_grad_(field.has_gradient)
    state = {name: value for name, value in values.items() if name not in ("streams", "pre_mix")}
    packed = codec.pack(values["streams"], values["pre_mix"], SharedState(**state))
    assert packed.numel() * 2 == planner.crossing(5).forward_bytes
    wire = packed.detach().clone().requires_grad_()
    streams, pre_mix, arrived = codec.unpack(wire)
    received = {"streams": streams, "pre_mix": pre_mix, **{k: v for k, v in vars(arrived).items() if v is not None}}
    for name, value in values.items():
        assert torch.equal(received[name], value), name

    taught = [(number, field) for number, field in enumerate(fields) if field.has_gradient]
    grads = {field.name: held(100 * number, field, adds=True) for number, field in taught}
    torch.autograd.backward([received[name] for name in grads], list(grads.values()))
    torch.autograd.backward(packed, codec.gradient_from_wire(codec.gradient_to_wire(wire.grad)))
    for _, field in taught:
        # The source's own sums over its groups follow: what arrives there adds up to what was sent back.
        back, sent = values[field.name].grad.clone(), grads[field.name].clone()
        axes = [context] * (field.context_copies > 1) + [tensor] * field.adds_over_tensor
        for group in axes:
            dist.all_reduce(back, group=group)
            dist.all_reduce(sent, group=group)
        torch.testing.assert_close(back, sent, rtol=1e-2 if field.dtype == "bfloat16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence", [False, True])
def test_copies_cross_once(sequence):
    run_ranks(check_copies_cross_once, 4, sequence)
