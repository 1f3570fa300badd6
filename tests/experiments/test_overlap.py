"""Exposed communication of synthetic steps whose answers are known."""

import random

import pytest

from megatron_dsv41.experiments.overlap import Span, account, length, split_waits, union, without


def compute(begin, end):
    return Span(begin, end)


def message(begin, end, kind="TP", members=(0, 1)):
    return Span(begin, end, kind, members)


def test_sets_of_intervals():
    assert union([(3, 5), (1, 2), (2, 3), (7, 7), (4, 4.5)]) == [(1, 5)]
    assert without([(0, 10)], [(2, 3), (1, 2.5), (9, 12)]) == [(0, 1), (3, 9)]
    assert without([(0, 1), (2, 3)], [(-1, 5)]) == []
    assert without([(0, 1)], []) == [(0, 1)]
    assert length([(0, 2), (1, 3), (5, 6)]) == 4


def test_sets_against_a_count_of_points():
    drawn = random.Random(0)
    for _ in range(200):
        some, others = ([(a, a + drawn.randrange(4)) for a in drawn.choices(range(30), k=8)] for _ in range(2))
        inside = [
            point for point in range(40) if any(a <= point < b for a, b in some) and not _within(point + 0.5, others)
        ]
        assert length(without(some, others)) == len(inside)


def _within(point, intervals):
    return any(a <= point < b for a, b in intervals)


def test_exposed_is_what_no_computation_covers():
    step = account([compute(0, 4), compute(6, 9), message(3, 7), message(8, 10, "DP")], 0, 10)
    assert step.kinds["TP"].total == 4 and step.kinds["TP"].exposed == 2
    assert step.kinds["DP"].total == 2 and step.kinds["DP"].exposed == 1
    assert (step.computing, step.exposed, step.idle, step.length) == (7, 3, 0, 10)


def test_nested_and_simultaneous_work_counts_once():
    """Two streams of communication, one inside the other, and computation on two streams."""
    spans = [message(0, 10), message(2, 5), message(4, 12, "DP"), compute(1, 3), compute(2, 4), compute(3, 3)]
    step = account(spans, 0, 12)
    assert step.kinds["TP"] == step.kinds["TP"].__class__(10, 7, 0)
    assert step.kinds["DP"].exposed == 8
    assert step.exposed == 9  # not 15: 4 to 10 is both kinds at once
    assert step.computing == 3 and step.idle == 0


def test_work_without_length_costs_nothing():
    step = account([message(5, 5), compute(2, 2)], 0, 10)
    assert step.kinds["TP"].total == step.kinds["TP"].exposed == step.computing == step.exposed == 0
    assert step.idle == 10


def test_work_that_straddles_the_step_is_cut():
    step = account([message(-5, 2), compute(-1, 1), message(9, 30, "DP"), message(40, 50, "PP")], 0, 10)
    assert (step.kinds["TP"].total, step.kinds["TP"].exposed) == (2, 1)
    assert step.kinds["DP"].total == 1 and step.kinds["PP"].total == 0
    assert step.idle == 10 - 1 - 2


def test_a_call_waits_until_its_last_rank_has_come():
    first = [compute(0, 2), message(2, 9), message(12, 14)]
    second = [compute(0, 7), message(7, 9), message(11, 14)]
    ranks = split_waits([first, second])
    assert [(s.begin, s.end, s.waits) for s in ranks[0] if s.kind] == [(2, 7, True), (7, 9, False), (12, 14, False)]
    assert [(s.begin, s.end, s.waits) for s in ranks[1] if s.kind] == [
        (7, 9, False),
        (11, 12, True),
        (12, 14, False),
    ]
    cost = account(ranks[0], 0, 14).kinds["TP"]
    assert (cost.total, cost.exposed, cost.waiting) == (9, 9, 5)


def test_computation_hides_waiting_too():
    ranks = split_waits([[message(0, 10), compute(1, 4)], [message(6, 10)]])
    cost = account(ranks[0], 0, 10).kinds["TP"]
    assert (cost.total, cost.exposed, cost.waiting) == (10, 7, 3)


def test_nothing_is_divided_where_ranks_disagree_about_calls():
    """The middle of a pipeline posts messages with both neighbours."""
    ranks = [[message(0, 5)], [message(3, 5), message(6, 7)]]
    assert split_waits(ranks) == ranks
    elsewhere = [[message(0, 5, members=(2, 3))], [message(1, 5, members=())]]
    assert split_waits(elsewhere) == elsewhere


def test_groups_are_told_apart():
    """Two tensor groups of two ranks each: only partners wait for each other."""
    ranks = split_waits(
        [
            [message(0, 5, members=(0, 1))],
            [message(2, 5, members=(0, 1))],
            [message(1, 9, members=(2, 3))],
            [message(4, 9, members=(2, 3))],
        ]
    )
    waits = [sum(s.end - s.begin for s in spans if s.waits) for spans in ranks]
    assert waits == [2, 0, 3, 0]
    assert sum(s.end - s.begin for s in ranks[2]) == pytest.approx(8)
