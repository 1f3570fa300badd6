"""Provider "triton" of csa2.select against the definition. On CUDA, or with TRITON_INTERPRET=1 on the CPU.

Scores that differ in the last bf16 bit (the definition sums heads in another order) may swap entries at the edge, so
exact equality is asked on inputs whose arithmetic is exact, and equal score multisets elsewhere.
"""

from typing import Any

import pytest
import torch

from megatron_dsv41.ops import registry
from megatron_dsv41.ops.csa2 import ref
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
REFERENCE = registry.load("csa2.select", "ref")


def exact_case(lengths, ratio, heads, dim=16, seed=0) -> Any:
    """Queries, weights and keys of small integers: every score is exact in bf16, and ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    seq = sum(lengths)
    entries = documents_from_lengths([lengths], seq, DEVICE).entries(ratio)
    q = torch.randint(-1, 2, (seq, heads, dim), generator=generator)
    weights = torch.randint(-1, 3, (seq, heads), generator=generator)
    keys = torch.randint(-1, 2, (entries.token_C.shape[0], dim), generator=generator)
    return *(x.to(torch.bfloat16).to(DEVICE) for x in (q, weights, keys)), entries


CASES = [([40], 1), ([41], 2), ([13, 1, 20], 1), ([9, 2, 18], 2), ([1], 1), ([1], 2)]
if not INTERPRETED:
    CASES += [([4001], 1), ([3001], 2), ([127, 1, 3000, 900], 1), ([130, 1000, 3], 2)]


@pytest.mark.parametrize(("lengths", "ratio"), CASES)
@pytest.mark.parametrize("topk", [1, 8, 64])
def test_selection_with_ties_equals_the_definition(lengths, ratio, topk):
    inputs = exact_case(lengths, ratio, heads=3)
    mine, none = registry.load("csa2.select", "triton")(*inputs, topk)
    truth, _ = REFERENCE(*inputs, topk)
    assert none is None
    assert torch.equal(mine, truth)


@pytest.mark.parametrize(("lengths", "ratio"), CASES)
def test_candidate_pool_and_restricted_selection(lengths, ratio):
    inputs = exact_case(lengths, ratio, heads=3)
    select = registry.load("csa2.select", "triton")
    mine, pool = select(*inputs, 8, block_size=4, num_blocks=3)
    truth, true_pool = REFERENCE(*inputs, 8, block_size=4, num_blocks=3)
    assert torch.equal(mine, truth)
    assert pool.dtype == torch.int32 and torch.equal(pool, true_pool)
    other = exact_case(lengths, ratio, heads=3, seed=1)
    again, _ = select(*other, 8, pool, 4)
    assert torch.equal(again, REFERENCE(*other, 8, pool, 4)[0])


def test_released_shape():
    """32 heads of 128 channels, random values: the selected scores are the definition's, as a multiset."""
    tokens = 40 if INTERPRETED else 2000
    generator = torch.Generator().manual_seed(3)
    entries = documents_from_lengths([[tokens]], tokens, DEVICE).entries(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16).to(DEVICE)  # noqa: E731
    q, weights, keys = draw(tokens, 32, 128), draw(tokens, 32) / 64, draw(tokens, 128)
    topk = 16 if INTERPRETED else 512
    mine, _ = registry.load("csa2.select", "triton")(q, weights, keys, entries, topk)
    truth, _ = REFERENCE(q, weights, keys, entries, topk)
    assert torch.equal(mine >= 0, truth >= 0)
    score = ref.index_scores(q, weights, keys).float()
    pick = lambda ids: score.gather(1, ids.clamp_min(0).long()).masked_fill(ids < 0, 0).sort(1).values  # noqa: E731
    torch.testing.assert_close(pick(mine), pick(truth), rtol=2e-2, atol=2e-2)
    assert (mine == truth).float().mean() > 0.9


def test_large_and_nan_free():
    q, weights, keys, entries = exact_case([50], 1, heads=3)
    mine, _ = registry.load("csa2.select", "triton")(q * 1e4, weights * -1e4, keys, entries, 8)
    truth, _ = REFERENCE(q * 1e4, weights * -1e4, keys, entries, 8)
    assert torch.equal(mine >= 0, truth >= 0)


def test_what_it_does_not_take_is_an_error():
    q, weights, keys, entries = exact_case([6], 1, heads=3)
    select = registry.load("csa2.select", "triton")
    with pytest.raises(ValueError, match="bfloat16"):
        select(q.float(), weights, keys, entries, 4)
    with pytest.raises(ValueError, match="powers of two"):
        select(q, weights, keys, entries, 4, None, 3, 2)
