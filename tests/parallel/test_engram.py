"""Rows fetched from their owners are the rows; gradients that return are their sums; what is wrong is named."""

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.ops.engram.ref import merge
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.parallel.engram import (
    OUT_OF_RANGE,
    SHORT,
    Route,
    read_faults,
    row_owners,
    row_updaters,
    split_rows,
)
from megatron_dsv41.testing.distributed import run_ranks

SIZES = (834, 41)  # rows of two tables
DIM = 8


def test_ranges_are_contiguous_and_without_padding():
    assert split_rows(0, 10, 4) == (0, 3, 6, 9, 10)
    assert split_rows(5, 7, 4) == (5, 6, 7, 7, 7)
    owners = row_owners(384_006_168, 7)
    assert owners.rows == 384_006_168 and owners.range_of(6) == (329_148_144, 384_006_168)
    updaters = row_updaters(41, 2, (0, 2))  # groups (0, 1) and (4, 5) have copies
    assert updaters.bounds == (0, 11, 21, 31, 41) and updaters.ranks == (0, 4, 1, 5)
    assert updaters.range_of(3) == (0, 0)
    ids = torch.arange(41)
    for rank in updaters.ranks:
        begin, end = updaters.range_of(rank)
        assert torch.equal((updaters.ranks_of(ids) == rank).nonzero()[:, 0], torch.arange(begin, end))


def test_empty_ranges_own_nothing():
    owners = row_owners(4, 6)
    assert owners.ranks_of(torch.arange(4)).tolist() == [0, 1, 2, 3]


def wanted(kind, rank):
    """Ids that one rank looks up in each table, unsorted and repeated."""
    generator = torch.Generator().manual_seed(rank)
    if kind == "random":
        return [torch.randint(size, (50 + 7 * rank,), generator=generator) for size in SIZES]
    if kind == "repeated":
        return [torch.randint(3, (40,), generator=generator) * (size // 3) for size in SIZES]
    if kind == "one row":
        return [torch.full((30,), size - 1) for size in SIZES]
    if kind == "nothing":
        return [torch.empty(0, dtype=torch.int64) for _ in SIZES]
    # adversarial: every rank asks all of one owner, the last rank asks nothing
    return [torch.arange(size if rank < dist.get_world_size() - 1 else 0).flip(0) for size in SIZES]


def whole_tables():
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(size, DIM, generator=generator) for size in SIZES]


def fetched(owners, group, ids, tables):
    """Values of `ids` per table through an exchange, and the route."""
    rank = group.rank() if group else 0
    unique = [torch.unique(part, return_inverse=True) for part in ids]
    route = Route(owners, [rows for rows, _ in unique], group)
    route.post_ids()
    held = [table.range_of(rank) for table in owners]
    assert read_faults(route.take_ids(held), group) == []
    reply = route.reply(lambda table, rows: tables[table][rows].contiguous().view(torch.uint8), DIM * 4)
    rows = reply.wait()
    assert read_faults(reply.fault, group) == []
    return [rows[route.places[table]].view(torch.float32)[inverse] for table, (_, inverse) in enumerate(unique)], route


def check_exchange(owners):
    """On a rank: lookups are bitwise those of the whole tables; returned gradients are their sums over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(i, i + owners))) for i in range(0, world, owners)]
    fetch_group = groups[rank // owners] if owners > 1 else None
    tables = whole_tables()
    for kind in ("random", "repeated", "one row", "nothing", "adversarial"):
        ids = wanted(kind, rank)
        found, _ = fetched([row_owners(size, owners) for size in SIZES], fetch_group, ids, tables)
        for table, rows, part in zip(tables, found, ids, strict=True):
            assert torch.equal(rows, table[part]), kind

        updaters = [row_updaters(size, owners, range(world // owners)) for size in SIZES]
        unique = [torch.unique(part, return_inverse=True) for part in ids]
        grads = [gradient(kind, rank, table, len(part)) for table, part in enumerate(ids)]
        route = Route(updaters, [rows for rows, _ in unique], dist.group.WORLD)
        route.post_ids()
        held = [table.range_of(rank) for table in updaters]
        assert read_faults(route.take_ids(held), dist.group.WORLD) == []
        summed = [
            merge(grad, Runs.of(inverse), into=torch.zeros(len(rows), DIM))
            for (rows, inverse), grad in zip(unique, grads, strict=True)
        ]
        arrived = route.forward(summed, DIM, torch.float32)
        values = arrived.wait()
        assert read_faults(arrived.fault, dist.group.WORLD) == []
        for table, (size, (begin, end)) in enumerate(zip(SIZES, held, strict=True)):
            here = route.asked(table)
            assert torch.equal(here, (route.received.table_E == table).nonzero()[:, 0])
            runs = Runs.of(route.received.ids_E[here]).among(route.received.places(1)[here])
            got, again = (merge(values, runs, into=torch.zeros(size, DIM))[begin:end] for _ in range(2))
            assert torch.equal(got, again)
            expected = torch.zeros(size, DIM, dtype=torch.float64)
            for other in range(world):
                part = wanted(kind, other)[table]
                expected.index_add_(0, part, gradient(kind, other, table, len(part)).double())
            torch.testing.assert_close(got.double(), expected[begin:end], rtol=1e-5, atol=1e-5)


def gradient(kind, rank, table, rows):
    generator = torch.Generator().manual_seed(1000 + 10 * rank + table)
    return torch.randn(rows, DIM, generator=generator)


def check_exchanges(*sizes):
    for owners in sizes:
        check_exchange(owners)


@pytest.mark.ranks(6)
@pytest.mark.parametrize(("world", "owners"), [(6, (1, 2, 3)), (4, (4,))])
def test_lookups_and_gradients(world, owners):
    run_ranks(check_exchanges, world, *owners)


def faults(kind):
    """On a rank: what every rank learns about a broken exchange."""
    group, rank = dist.group.WORLD, dist.get_rank()
    owners, tables = [row_owners(size, 2) for size in SIZES], whole_tables()
    ids = [torch.tensor([3, 500]), torch.tensor([7, 30])]
    if rank == 1 and kind in ("high", "negative", "misrouted"):
        ids[1] = {"high": torch.tensor([7, 41]), "negative": torch.tensor([-1, 7])}.get(kind, ids[1])
        if kind == "misrouted":  # the other rank believes in other ranges
            owners[0] = row_owners(1200, 2)
    route = Route(owners, ids, group)
    stock = dist.all_to_all_single
    if rank == 1 and kind == "short ids":
        dist.all_to_all_single = shortened(stock)
    route.post_ids()
    dist.all_to_all_single = stock
    found = read_faults(route.take_ids([row_owners(size, 2).range_of(rank) for size in SIZES]), group)
    if kind == "short rows":
        if rank == 1:
            dist.all_to_all_single = shortened(stock)
        reply = route.reply(lambda table, rows: tables[table][rows].contiguous().view(torch.uint8), DIM * 4)
        dist.all_to_all_single = stock
        reply.wait()
        found += read_faults(reply.fault, group)
    return found


def shortened(stock):
    """An exchange whose message to rank 0 lacks its first element."""

    def exchange(receive, send, receive_splits=None, send_splits=None, **kwargs):
        return stock(receive, send[1:].clone(), receive_splits, [send_splits[0] - 1, *send_splits[1:]], **kwargs)

    return exchange


FAULTS = {
    "none": [],
    "high": [(1, OUT_OF_RANGE, 1, 1, 41)],
    "negative": [(0, OUT_OF_RANGE, 1, 1, -1)],
    "misrouted": [(0, OUT_OF_RANGE, 1, 0, 500)],
    "short ids": [(0, SHORT, 1, 1, 2)],  # the seal slid to where row 7 or 30 should be
    "short rows": [(0, SHORT, 1, 1, 30)],  # the last row that was asked of rank 1
}


def all_faults():
    return [faults(kind) for kind in FAULTS]


@pytest.mark.ranks(2)
def test_what_is_wrong_is_named():
    assert run_ranks(all_faults, 2) == [list(FAULTS.values())] * 2
