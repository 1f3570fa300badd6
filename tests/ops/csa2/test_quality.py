"""Measures of a selection against definitions written as loops."""

import pytest
import torch

from megatron_dsv41.ops.csa2.quality import QUALITY, probe_rows, selection_quality


@pytest.mark.parametrize("previous", [False, True])
def test_quality_by_hand(previous):
    generator = torch.Generator().manual_seed(0)
    probes, entries, k = 9, 12, 3
    teacher = torch.rand(probes, entries, generator=generator)
    visible = torch.arange(entries) < torch.arange(1, probes + 1)[:, None]
    teacher = teacher * visible
    chosen = [sorted(torch.randperm(t + 1, generator=generator)[:k].tolist()) for t in range(probes)]
    before = [sorted(torch.randperm(t + 1, generator=generator)[:k].tolist()) for t in range(probes)]
    pad = lambda rows: torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)  # noqa: E731

    found = selection_quality(teacher, visible, pad(chosen), pad(before) if previous else None)

    expected = dict.fromkeys(QUALITY, 0.0)
    for t in range(probes):
        if t + 1 <= k:  # everything is selected: nothing to judge
            continue
        best = sorted(range(t + 1), key=lambda c: -float(teacher[t, c]))[:k]
        expected["queries"] += 1
        expected["recall"] += len(set(best) & set(chosen[t])) / k
        expected["mass"] += sum(float(teacher[t, c]) for c in chosen[t]) / sum(float(teacher[t, c]) for c in best)
        if previous:
            expected["compared"] += 1
            expected["overlap"] += len(set(before[t]) & set(chosen[t])) / k
    assert expected["recall"] < expected["mass"] < expected["queries"]
    torch.testing.assert_close(found, torch.tensor([expected[name] for name in QUALITY]))


def test_the_true_top_k_is_perfect():
    teacher = torch.rand(5, 8, generator=torch.Generator().manual_seed(1))
    best = teacher.topk(2, dim=1).indices.sort(1).values.int()
    queries, recall, mass, _, _ = selection_quality(teacher, torch.ones(5, 8, dtype=torch.bool), best, None).tolist()
    assert (queries, recall, mass) == (5, 5, pytest.approx(5))


@pytest.mark.parametrize(("tokens", "probes", "rows"), [(10, 3, [2, 5, 9]), (4, 9, [0, 1, 2, 3]), (7, 1, [6])])
def test_probed_rows_are_spread_and_end_at_the_last(tokens, probes, rows):
    assert probe_rows(tokens, probes, torch.device("cpu")).tolist() == rows
