"""Dispatch and combine against plain indexing, forward and backward, bit for bit the same on every run."""

import pytest
import torch

from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.routing.permutation import PartOfPermutation, Permutation

OPS = Ops()


def routing(tokens, experts, chosen, seed=0):
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(chosen, dim=1).indices


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 1, 1), (7, 4, 2), (33, 6, 6), (5, 40, 3)])
def test_rows_are_sorted_by_expert_then_token(tokens, experts, chosen):
    indices = routing(tokens, experts, chosen)
    rows = Permutation.of(indices, experts, OPS)
    expected = sorted((expert, token) for token, row in enumerate(indices.tolist()) for expert in row)
    assert (rows.pair_P // chosen).tolist() == [token for _, token in expected]
    assert indices.flatten()[rows.pair_P].tolist() == [expert for expert, _ in expected]
    assert rows.counts_E.tolist() == [indices.eq(expert).sum() for expert in range(experts)]
    x = torch.randn(tokens, 3)
    assert torch.equal(rows.dispatch(x), x[[token for _, token in expected]])


def test_combine_adds_in_expert_order():
    indices = torch.tensor([[2, 0, 1], [1, 2, 0]])
    rows = Permutation.of(indices, 3, OPS)
    big, one = 2.0**24, 1.0  # in fp32 only one order of addition keeps both ones
    values = torch.empty(6, 1)
    values[rows.place_TK[0]] = torch.tensor([[one], [one], [big]])
    values[rows.place_TK[1]] = torch.tensor([[big], [-big], [one]])
    assert rows.combine(values, torch.float32).flatten().tolist() == [big + 2, 1.0]


def test_gradcheck():
    rows = Permutation.of(routing(6, 5, 3), 5, OPS)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(18, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rows.dispatch, [x])
    assert torch.autograd.gradcheck(lambda rows_PD: rows.combine(rows_PD, torch.float64), [y])


def part(indices, experts):
    return PartOfPermutation(indices, experts, OPS).wait()


@pytest.mark.parametrize("experts", [range(0, 6), range(2, 4), range(5, 6), range(6, 9), range(3, 3)])
def test_a_part_is_the_rows_of_its_experts(experts):
    """Also of no expert, and of experts that nobody chose."""
    indices = routing(33, 6, 3)
    whole, rows = Permutation.of(indices, 9, OPS), part(indices, experts)
    begin, end = (int(whole.counts_E[:stop].sum()) for stop in (experts.start, experts.stop))
    assert torch.equal(rows.pair_P, whole.pair_P[begin:end])
    assert torch.equal(rows.counts_E, whole.counts_E[experts.start : experts.stop])
    x = torch.randn(33, 4)
    assert torch.equal(rows.dispatch(x), whole.dispatch(x)[begin:end])
    y = torch.randn(33 * 3, 4)
    y_here = torch.zeros_like(y)
    y_here[begin:end] = y[begin:end]
    # Zeros elsewhere leave what is added, and its order, alone.
    assert torch.equal(rows.combine(y[begin:end], torch.float32), whole.combine(y_here, torch.float32))


def test_a_pair_elsewhere_neither_gets_nor_gives():
    rows = part(torch.tensor([[2, 0], [0, 1]]), range(1, 2))
    x = torch.tensor([[float("nan")], [7.0]])
    assert rows.dispatch(x).tolist() == [[7.0]]
    assert rows.combine(torch.tensor([[3.0]]), torch.float32).tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize("experts", [range(1, 3), range(5, 5)])
def test_gradcheck_of_a_part(experts):
    rows = part(routing(6, 5, 3), experts)
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(rows.pair_P), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rows.dispatch, [x])
    assert torch.autograd.gradcheck(lambda rows_PD: rows.combine(rows_PD, torch.float64), [y])
