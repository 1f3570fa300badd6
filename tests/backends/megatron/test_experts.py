"""Experts over ranks whose tokens are gathered: bit for bit what the definition of every rank's part adds up to."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_dsv41 import presets
from megatron_dsv41.modules.primitives import Experts
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.routing.ref import swiglu
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.distributed import run_ranks

T, K, PER_RANK, WIDTH = 7, 3, 2, 32
KINDS = ["even", "one expert for all", "an expert idle", "one rank idle"]
KERNELS = {"routing.spread_rows": "triton", "routing.sum_rows": "triton", "routing.experts": "grouped"}


def routing(kind, size):
    """Chosen experts [ranks * T, K] of all ranks' tokens; every rank has the experts 2 r and 2 r + 1."""
    experts, tokens = PER_RANK * size, size * T
    if kind == "one rank idle":
        allowed = experts - PER_RANK  # nothing for the last rank
    elif kind == "an expert idle":
        allowed = experts - 1
    else:
        allowed = experts
    scores = torch.rand(tokens, allowed, generator=torch.Generator().manual_seed(1))
    if kind == "one expert for all":
        scores[:, 1] += 2.0
    return scores.topk(min(K, allowed), 1).indices


def values(size, dtype):
    """x [ranks * T, d], weights [ranks * T, K], gradient [ranks * T, d] of all, and the whole w13 and w2."""
    generator = torch.Generator().manual_seed(2)
    draw = functools.partial(torch.randn, generator=generator)
    config = config_of(size)
    d, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    w13, w2 = (draw(experts, 2, inner, d) * 0.2).to(dtype), (draw(experts, d, inner) * 0.2).to(dtype)
    return draw(size * T, d).to(dtype), draw(size * T, K).abs(), draw(size * T, d), w13, w2


def config_of(size):
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": 16, "n_routed_experts": PER_RANK * size}
    return presets.tiny().with_overrides(sizes)


def part_of(experts, x, indices, weights, w13, w2):
    """What some experts make of all tokens: fp32 sums in expert order, rounded to the dtype of x."""
    wide, total = x.float(), torch.zeros(x.shape)
    for expert, (w1, w3), down in zip(experts, w13, w2, strict=True):
        tokens, slots = (indices == expert).nonzero(as_tuple=True)
        rows = wide[tokens].to(x.dtype)
        hidden = swiglu(F.linear(rows, w1), F.linear(rows, w3), 10.0, weights[tokens, slots])
        total = total.index_add(0, tokens, F.linear(hidden, down).float())
    return total.to(x.dtype)


def expected(indices, size, dtype):
    """Output and gradients (x, weights, w13, w2) of all tokens and experts: parts of ranks added in fp32."""
    x, weights, grad, w13, w2 = values(size, dtype)
    y, grad_x, of_weights, of_experts = torch.zeros(x.shape), torch.zeros(x.shape), torch.zeros(weights.shape), []
    for rank in range(size):
        here = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        leaves = [t.clone().requires_grad_() for t in (x, weights[:, : indices.shape[1]], w13[here], w2[here])]
        part = part_of(range(here.start, here.stop), leaves[0], indices, *leaves[1:])
        y = y + part.detach().float()
        found = torch.autograd.grad(part, leaves, grad.to(dtype))
        grad_x = grad_x + found[0].float()
        of_weights[:, : indices.shape[1]] += found[1]
        of_experts.append(found[2:])
    of_w13, of_w2 = (torch.cat(parts) for parts in zip(*of_experts, strict=True))
    return y, grad_x.to(dtype), of_weights[:, : indices.shape[1]], of_w13, of_w2


def gathered_experts(size, dtype, ops):
    from megatron_dsv41.backends.megatron.experts import GatheredExperts
    from megatron_dsv41.backends.megatron.layout import Axis, Layout

    torch.manual_seed(0)
    layout = Layout(ep=Axis.of(dist.group.WORLD))
    experts = GatheredExperts(config_of(size), dtype, Ops(ops), layout)
    *_, w13, w2 = values(size, dtype)
    here = slice(layout.ep.rank * PER_RANK, (layout.ep.rank + 1) * PER_RANK)
    experts.w13.data.copy_(w13[here])
    experts.w2.data.copy_(w2[here])
    return experts


def run_on_rank(kind, dtype, recompute=False, ops=None, on="cpu"):
    """Output and gradients of this rank's tokens and experts, and the shapes that were kept for backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    experts, indices = gathered_experts(size, dtype, ops).to(on), routing(kind, size).to(on)
    x, weights, grad, *_ = values(size, dtype)
    own = slice(rank * T, (rank + 1) * T)
    leaves = [t[own].to(on, copy=True).requires_grad_() for t in (x, weights[:, : indices.shape[1]])]
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call = functools.partial(checkpoint, experts, use_reentrant=False) if recompute else experts
        y = call(leaves[0], indices[own], leaves[1])
    grads = torch.autograd.grad(y, [*leaves, experts.w13, experts.w2], grad[own].to(on))
    return *(t.detach().cpu() for t in (y, *grads)), kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_equals_the_sum_of_parts_bitwise(size, dtype, kind):
    wanted = expected(routing(kind, size), size, dtype)
    ranks = run_ranks(run_on_rank, size, kind, dtype)
    for index, name in enumerate(("y", "grad x", "grad weights", "grad w13", "grad w2")):
        found = torch.cat([rank[index] for rank in ranks])
        assert found.dtype == wanted[index].dtype and torch.equal(found, wanted[index]), name


def test_backward_keeps_the_rows_of_this_rank_alone():
    ranks = run_ranks(run_on_rank, 2, "even", torch.float32, False, {"routing.experts": "grouped"})
    for rank, (*_, kept) in enumerate(ranks):
        number = int((routing("even", 2) // PER_RANK == rank).sum())
        assert (number, WIDTH) in kept and (2 * T, WIDTH) not in kept


@pytest.mark.parametrize("kind", ["even", "one rank idle"])
def test_is_what_one_process_computes(kind):
    size = 2
    indices = routing(kind, size)
    x, weights, grad, w13, w2 = values(size, torch.float32)
    whole = Experts(config_of(size), torch.float32, Ops())
    whole.w13.data.copy_(w13)
    whole.w2.data.copy_(w2)
    leaves = [x.requires_grad_(), weights[:, : indices.shape[1]].clone().requires_grad_()]
    y = whole(leaves[0], indices, leaves[1])
    wanted = [y.detach(), *torch.autograd.grad(y, [*leaves, whole.w13, whole.w2], grad)]
    ranks = run_ranks(run_on_rank, size, kind, torch.float32)
    for index, one in enumerate(wanted):
        torch.testing.assert_close(torch.cat([rank[index] for rank in ranks]), one, rtol=1e-5, atol=1e-6)
    # Gradients of routing weights and of experts are of one rank alone.
    for index in (2, 3, 4):
        assert torch.equal(torch.cat([rank[index] for rank in ranks]), wanted[index])


def test_recomputed_is_the_same():
    kept, again = (run_ranks(run_on_rank, 2, "even", torch.bfloat16, recompute) for recompute in (False, True))
    for one, other in zip(kept, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1], strict=True))
        assert len(other[-1]) == 3  # the inputs alone


def begun_and_called(kind):
    """On a rank: the output begun and called, the output called at once, and how often the module's hooks ran.

    Megatron gathers updated parameters in hooks before a module's forward pass.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    experts, indices = gathered_experts(size, torch.float32, None), routing(kind, size)
    x, weights, *_ = values(size, torch.float32)
    own, calls = slice(rank * T, (rank + 1) * T), []
    experts.register_forward_pre_hook(lambda module, arguments: calls.append(len(calls)))
    operands = (x[own], indices[own], weights[own, : indices.shape[1]])
    finish = experts.begin(*operands)
    assert not calls
    return finish(), experts(*operands), calls


@pytest.mark.parametrize("kind", ["even", "one rank idle"])
def test_what_begins_ends_as_the_call(kind):
    for begun, called, calls in run_ranks(begun_and_called, 2, kind):
        assert torch.equal(begun, called) and calls == [0, 1]


@pytest.mark.parametrize("dispatcher", ["auto", "alltoall", "allgather"])
def test_auto_gathers_where_that_sends_no_more(dispatcher):
    from megatron_dsv41.run_config import Parallel

    gathers = [Parallel(ep=ep, dispatcher=dispatcher).gathers_tokens(6) for ep in (1, 6, 7, 64)]
    assert gathers == {"auto": [True, True, False, False], "alltoall": [False] * 4, "allgather": [True] * 4}[dispatcher]


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_two_gpus(kind):
    wanted = expected(routing(kind, 2), 2, torch.bfloat16)
    ranks = run_ranks(run_on_rank, 2, kind, torch.bfloat16, device="cuda", ops=KERNELS, on="cuda")
    for index, one in enumerate(wanted):
        assert relative_error(torch.cat([rank[index] for rank in ranks]), one.double()) < 2e-2
