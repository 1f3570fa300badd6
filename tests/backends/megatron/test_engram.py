"""Owned tables against whole ones: lookups, updates, checkpoints, and what one rank learns of another's mistakes."""

import itertools
import shutil
import time

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny import identity_map, tiny_config
from megatron_dsv41.testing.tiny_run import smooth, tiny_run

DIM = tiny_config().engram_head_dim
LAYERS = (1, 3)


def opened(owners, table="float32", master="float32", layers=LAYERS, **settings):
    """On a rank: an exchange whose tables hold the drawn rows; `layers` are those that this rank runs."""
    from megatron_dsv41.backends.megatron.engram import EngramExchange
    from megatron_dsv41.backends.megatron.engram_tables import EngramGroups, OwnedTable
    from megatron_dsv41.backends.megatron.layout import Layout
    from megatron_dsv41.modules.engram import EngramHash
    from megatron_dsv41.ops.engram.rows import RowFormat

    config, form = tiny_config(), RowFormat(table, DIM)
    groups, device = EngramGroups.create(owners, layers), torch.device("cpu")
    tables = {
        layer: OwnedTable(layer, config.engram_rows(layer), form, getattr(torch, master), groups, device)
        for layer in groups.holders
    }
    for layer, owned in tables.items():
        owned.fill(lambda rows, layer=layer: whole(layer)[rows])
    hashing, scale = EngramHash(config, identity_map(config)), 1 / dist.get_world_size()
    return EngramExchange(
        hashing, Layout(), groups, tables, layers, form, dtype=torch.float32, gradient_scale=scale, **settings
    )


def whole(layer):
    """The table that nobody holds."""
    from megatron_dsv41.modules.engram import draw_rows

    return draw_rows(7, layer, slice(0, tiny_config().engram_rows(layer)), DIM, 0.1)


def batches(step, rank, count=3):
    """Token ids and documents of a rank's micro-batches: packed documents, an image span, padding."""
    from megatron_dsv41.ops.documents import documents_from_ids

    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for number in range(count):
        ids = torch.randint(3, 6 if number == 1 else 90, (1, 24), generator=generator)  # repeated rows in one of them
        document = torch.arange(24)[None] // 9
        alive, image = torch.arange(24)[None] < 22, (torch.arange(24)[None] % 11) == 4
        found.append((ids, documents_from_ids(document, alive, image)))
    return found


def weights(step, rank, number, layer, shape):
    generator = torch.Generator().manual_seed(((step * 10 + rank) * 10 + number) * 10 + layer)
    return torch.randn(shape, generator=generator)


def steps_of(exchange, settings, steps, layers=LAYERS):
    """Run steps whose loss is a weighted sum of what is read; the optimizer. Rows are asked for one step ahead."""
    from megatron_dsv41.optim.groups import group_parameters
    from megatron_dsv41.optim.optimizer import MixedOptimizer, optimizer_group
    from megatron_dsv41.phase import Phase

    rank, config = dist.get_rank(), tiny_config()
    shapes = {owned.name: (owned.rows, DIM) for owned in exchange.owned.values()}
    groups = group_parameters(shapes, config, Phase(), settings) if shapes else ()
    masters = {owned.name: owned for owned in exchange.owned.values()}
    optimizer = MixedOptimizer(
        [
            optimizer_group(group, [masters[n].master for n in group.shapes], [masters[n].place for n in group.shapes])
            | {"lr": settings.lr * group.lr}
            for group in groups
        ]
        or [{"params": [torch.zeros(1)], "places": [], "algorithm": "adamw", "frozen": True}],
        settings,
    )
    ahead = exchange.announce(batches(0, rank), training=True)
    for step in range(steps):
        rows, ahead = ahead, None
        exchange.begin(rows)
        if step + 1 < steps:
            exchange.upcoming = ahead = exchange.announce(batches(step + 1, rank), training=True)
        expected = {layer: current(exchange, layer) for layer in LAYERS}
        for number, fetched in enumerate(rows.batches):
            exchange.reached(rows, number)
            for layer in layers:
                found = fetched[layer].read()
                ids = exchange.hash(batches(step, rank)[number][0].flatten(), batches(step, rank)[number][1])[layer]
                assert torch.equal(found, expected[layer][ids])
                (found * weights(step, rank, number, layer, found.shape)).sum().backward()
        exchange.start_return()
        exchange.finish_return()
        optimizer.step()
        for owned in exchange.owned.values():
            owned.publish()
        exchange.tables_changed()
    return optimizer


def current(exchange, layer):
    """The whole table as it is served now, put together from everybody's rows."""
    owned = exchange.owned.get(layer)
    own = (owned.begin, exchange.form.decode(owned.published, torch.float32)) if owned else None
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    table = torch.empty(tiny_config().engram_rows(layer), DIM)
    for begin, rows in filter(None, everyone):
        table[begin : begin + len(rows)] = rows
    return table


def plain_steps(settings, steps, world, layer, dtype=torch.float32):
    """The same steps on one whole table of `dtype`, fp32 again."""
    from megatron_dsv41.modules.engram import EngramHash
    from megatron_dsv41.optim.groups import group_parameters
    from megatron_dsv41.optim.optimizer import whole_optimizer
    from megatron_dsv41.phase import Phase

    config, table, name = tiny_config(), whole(layer).to(dtype), f"layers.{layer}.engram.embed.weight"
    hashing = EngramHash(config, identity_map(config))
    optimizer = whole_optimizer(
        {name: table}, group_parameters({name: tuple(table.shape)}, config, Phase(), settings), settings
    )
    table.grad_dtype = None
    for step in range(steps):
        table.grad = torch.zeros(table.shape)
        for rank in range(world):
            for number, (ids, documents) in enumerate(batches(step, rank)):
                rows = hashing(ids.flatten(), documents)[layer]
                grad = weights(step, rank, number, layer, (*rows.shape, DIM)) / world
                table.grad.index_add_(0, rows.flatten(), grad.flatten(0, 1))
        optimizer.step()
    return table.float()


def check_steps(cases):
    """On a rank: after some steps every owner serves what the whole table became."""
    from megatron_dsv41.optim.settings import Optimizer

    worst = {}
    for name, owners, settings in cases:
        optimizer = Optimizer(name=name, lr=0.01, eps=1e-8)
        exchange = opened(owners, **settings)
        steps_of(exchange, optimizer, 2)
        for layer in LAYERS:
            found, start = current(exchange, layer), whole(layer)
            dtype = getattr(torch, settings.get("master", "float32"))
            expected = plain_steps(optimizer, 2, dist.get_world_size(), layer, dtype)
            moved = float((expected - start).abs().max())
            # In bfloat16, of the few that a rounding of fp32 sums sent to the other side.
            unequal = found != expected if dtype is torch.bfloat16 else torch.zeros(1, dtype=torch.bool)
            close = torch.isclose(found, expected, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=2e-6)
            worst[name, owners, str(settings), layer] = (bool(close.all()), int(unequal.sum()), moved)
    return worst


@pytest.mark.ranks(6)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (6, [("published", owners, {"window": 2}) for owners in (1, 2, 3)]),
        (4, [("published", 4, {}), ("muon", 2, {}), ("published", 4, {"master": "bfloat16", "table": "bfloat16"})]),
    ],
)
def test_lookups_and_updates_are_those_of_the_whole_table(world, cases):
    first, *others = run_ranks(check_steps, world, cases)
    assert all(other == first for other in others)
    for case, (close, unequal, moved) in first.items():
        assert close and unequal <= 2 and moved > 0.01, (case, unequal, moved)


def float8_steps():
    """On a rank: a float8 table serves the rounded master."""
    from megatron_dsv41.optim.settings import Optimizer

    exchange = opened(2, table="float8")
    steps_of(exchange, Optimizer(name="published", lr=0.01), 2)
    for owned in exchange.owned.values():
        offset = owned.first - owned.begin
        part = owned.published[offset : offset + len(owned.master)]
        assert torch.equal(part, exchange.form.encode(owned.master)) and len(part)
    return {layer: current(exchange, layer) for layer in LAYERS}


def stage_layers():
    """On a rank of a pipeline of two: each runs one of the two layers; groups lie on a stage or across both."""
    from megatron_dsv41.optim.settings import Optimizer

    found = {}
    for owners in (1, 2, 4):
        mine = LAYERS[dist.get_rank() // 2 :][:1]
        exchange = opened(owners, layers=mine)
        assert set(exchange.owned) == (set(mine) if owners < 4 else set(LAYERS))
        steps_of(exchange, Optimizer(name="published", lr=0.01), 2, layers=mine)
        found[owners] = {layer: current(exchange, layer) for layer in LAYERS}
    return found


@pytest.mark.ranks(4)
def test_float8_and_pipelines():
    one, two = run_ranks(float8_steps, 2)
    assert all(torch.equal(one[layer], two[layer]) for layer in LAYERS)
    ranks = run_ranks(stage_layers, 4)
    for layer in LAYERS:
        assert all(torch.equal(rank[2][layer], ranks[0][2][layer]) for rank in ranks)
        for owners in (1, 4):
            torch.testing.assert_close(ranks[0][owners][layer], ranks[0][2][layer], rtol=1e-5, atol=1e-6)
        assert (ranks[0][2][layer] - whole(layer)).abs().max() > 0.01


def overlapped():
    """On a rank: rank 1 takes 0.4 s to serve while rank 0 computes, in turn for 0.8 s and not at all, three times."""
    exchange, rank = opened(2), dist.get_rank()
    if rank == 1:
        owned, stock = exchange.owned[1], exchange.owned[1].serve
        owned.serve = lambda ids: (time.sleep(0.4), stock(ids))[1]
    found = []
    for seconds in (0.8, 0.0) * 3:
        step = exchange.announce(batches(0, rank), training=True)
        exchange.upcoming = step
        exchange.tables_changed()
        window = step.windows[0]
        in_flight = window.reply is not None and window.reply.work is not None and not window.waited
        time.sleep(seconds)
        exchange.begin(step)
        for fetched in step.batches:
            fetched[1].read().sum().backward()
        exchange.start_return()
        exchange.finish_return()
        found.append((in_flight, {key: float(value) for key, value in exchange.milliseconds().items()}))
    return found


def held(layers):
    """On a rank: the most bytes that torch had allocated beside the tables during a step of many micro-batches, and the
    plan's bound. The values that a layer reads, and their gradients, are activations: one micro-batch's at a time.

    layers: of this rank; without any it owns rows that the other one reads.
    """
    from megatron_dsv41.experiments.engram_memory import engram_owner_bytes, engram_step_bytes

    exchange, rank, count = opened(2, layers=layers), dist.get_rank(), 40
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = exchange.announce(batches(0, rank, count), training=True)
        exchange.begin(step)
        exchange.upcoming = exchange.announce(batches(1, rank, count), training=True)
        for fetched in step.batches:
            for rows in fetched.values():
                rows.read().sum().backward()
        exchange.start_return()
        exchange.finish_return()
        assert step.returns is not None
        distinct = sum(len(gradient.ids_U) for gradient in step.gradients.values())
        arrived = len(step.returns.received.ids_E)
        entries = sum(rows.places_TC.numel() for fetched in step.batches for rows in fetched.values())
    results = profile.profiler.kineto_results
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    peak = max(itertools.accumulate(changes))
    if layers:
        return peak, engram_step_bytes(distinct, entries, DIM, exchange.form.width)
    return peak, engram_owner_bytes(arrived, arrived, DIM, exchange.form.width)


def least_held():
    """On a rank: of a pair that both run all layers, and of one whose second rank runs none.

    The least of three: a thread of gloo's may give up a buffer a moment after its exchange was waited for.
    """
    return [min(held(layers) for _ in range(3)) for layers in (LAYERS, () if dist.get_rank() else LAYERS)]


def waits():
    """On a rank: operations between the beginning of a step and the return of gradients that would make the host wait
    for a GPU, with a window of one micro-batch and with one for the step.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Waits(TorchDispatchMode):
        names = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.removeprefix("aten::")
            if name.startswith(self.names):
                found.append(name)
            return func(*args, **(kwargs or {}))

    found = []
    for window in (1, None):
        exchange = opened(2, table="float8", window=window)
        step = exchange.announce(batches(0, dist.get_rank()), training=True)
        exchange.begin(step)
        with Waits():
            for number, fetched in enumerate(step.batches):
                exchange.reached(step, number)
                for rows in fetched.values():
                    rows.read().sum().backward()
            exchange.start_return()
        exchange.finish_return()
    return found


def profiled():
    """On a rank: names of the profiler's ranges in one step."""
    from megatron_dsv41.optim.settings import Optimizer

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps_of(opened(2), Optimizer(name="published"), 1)
    return {event.key for event in profile.key_averages()}


def watch():
    return overlapped(), least_held(), profiled(), waits()


@pytest.mark.ranks(2)
def test_the_next_steps_rows_are_in_flight_and_cost_what_is_planned():
    from megatron_dsv41.backends.megatron.engram_window import FETCH, RETURN, WAIT

    for fetches, memory, ranges, waiting in run_ranks(watch, 2):
        assert all(in_flight for in_flight, _ in fetches)
        hidden, exposed = ([times for _, times in fetches[first::2]] for first in (0, 1))
        # The best of three: a busy machine may keep a rank waiting for other reasons.
        assert min(times["engram_fetch_exposed_ms"] for times in hidden) < 250
        assert max(times["engram_fetch_hidden_ms"] for times in hidden) > 350
        assert max(times["engram_fetch_exposed_ms"] for times in exposed) > 300
        for found, planned in memory:
            assert 0.7 * planned < found <= planned
        assert {FETCH, WAIT, RETURN} <= ranges
        assert waiting == []


def wrong(kind):
    """On a rank: what stops it when rank 1 makes a mistake."""
    from megatron_dsv41.backends.megatron.engram import EngramFault

    exchange, stock, rank = opened(2), dist.all_to_all_single, dist.get_rank()
    hashing = exchange.hash

    def misled(ids, documents, layers):
        rows = hashing(ids, documents, layers)
        rows[3][5, 2] = 1020 if kind == "high" else -1
        return rows

    def shortened(receive, send, receive_splits=None, send_splits=None, **group):
        return stock(receive, send[1:].clone(), receive_splits, [send_splits[0] - 1, *send_splits[1:]], **group)

    try:
        if rank == 1 and kind in ("high", "stray"):
            exchange.hash = misled
            misled.token_map = hashing.token_map
        step = exchange.announce(batches(0, rank), training=True)
        if rank == 1 and kind == "short":
            dist.all_to_all_single = shortened
        exchange.begin(step)
        dist.all_to_all_single = stock
        for fetched in step.batches:
            fetched[3].read().sum().backward()
        exchange.start_return()
        exchange.finish_return()
    except EngramFault as fault:
        return str(fault)
    return None


def all_wrong(kinds):
    return [wrong(kind) for kind in kinds]


@pytest.mark.ranks(2)
def test_mistakes_stop_every_rank_with_ranks_table_and_row():
    expected = {
        "none": None,
        "high": "rank 1 asked rank 1 for row 1020 of layers.3.engram.embed, which has rows 510 to 1019 of its 1020 ",
        "stray": "rank 1 asked rank 0 for row -1 of layers.3.engram.embed, which has rows 0 to 509 of its 1020 rows",
        "short": "an Engram exchange came short: of what rank 1 sends, not all has arrived at rank 0; the last that ",
    }
    for messages in run_ranks(all_wrong, 2, list(expected)):
        for message, start in zip(messages, expected.values(), strict=True):
            assert (message is None) if start is None else message.startswith(start), message
        assert messages[-1].endswith("of layers.3.engram.embed") and " is row " in messages[-1]


SMOOTH = (
    *smooth(),
    "optimizer.name=published",
    "batch.micro=1",
    "batch.sequences=6",
    "checkpoint.interval=2",
    "train.steps=6",
)


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def trained(home, name, world, *overrides, since=None):
    """Losses of a run, from scratch or from the newest checkpoint of another that is not after step `since[1]`."""
    folder = home / name
    if since is not None:
        shutil.copytree(home / since[0], folder)
        for step in checkpoints.complete_steps(folder):
            if step > since[1]:
                shutil.rmtree(checkpoints.checkpoint_path(folder, step))
    assert run_ranks(train, world, home, *SMOOTH, f"checkpoint.folder={folder}", *overrides) == [0] * world
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engram")
    tiny_run(folder)
    return folder


def test_training_is_training_with_whole_tables(home):
    short = "train.steps=3"
    expected = trained(home, "short-plain", 1, short)
    assert trained(home, "short", 2, short, "parallel.engram=2") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_training_resumes_with_other_owners(home):
    """Owners 2, then 3, then 1, and the whole table: one curve."""
    expected = trained(home, "plain", 1)
    two = trained(home, "two", 2, "parallel.engram=2")
    assert two == pytest.approx(expected, rel=1e-5)
    assert trained(home, "three", 3, "parallel.engram=3", since=("two", 2)) == pytest.approx(expected, rel=1e-4)
    assert trained(home, "one", 1, "parallel.engram=1", since=("three", 4)) == pytest.approx(expected, rel=1e-4)
    rows = [row for row in read_metrics(home / "two") if "loss" in row]
    assert all({"engram_fetch_hidden_ms", "engram_fetch_exposed_ms"} <= set(row) for row in rows)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="fp32", marks=pytest.mark.slow),
        pytest.param(
            ("train.precision=bf16", "optimizer.momentum_dtype=bfloat16", "parallel.pp=2"),
            id="bf16-pp2",
        ),
        pytest.param(
            ("train.precision=bf16", "engram.table=float8", "engram.master=bfloat16", "engram.window=1"),
            id="float8",
            marks=pytest.mark.slow,
        ),
        pytest.param(("optimizer.name=adamw", "engram.memory=host"), id="adamw-host", marks=pytest.mark.slow),
        pytest.param(
            ("parallel.pp=2", "parallel.vpp=2", "train.recompute=block", "eval.interval=2"),
            id="vpp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_same_owners_resume_bitwise(home, overrides, request):
    name = request.node.callspec.id
    whole_run = trained(home, name, 2, "parallel.engram=2", *overrides)
    assert trained(home, f"{name}-again", 2, "parallel.engram=2", *overrides, since=(name, 2)) == whole_run


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("parallel.pp=2",), ("parallel.cp=2",), ("parallel.tp=2", "parallel.sp=true"), ("parallel.ep=2",)],
    ids=["pp2", "cp2", "sp2", "ep2"],
)
def test_training_in_layouts_is_training_with_whole_tables(home, overrides, request):
    name = request.node.callspec.id
    plain = trained(home, f"{name}-plain", 2, *overrides)
    assert trained(home, name, 2, "parallel.engram=2", *overrides) == pytest.approx(plain, rel=1e-5)


def messages(folder, *cases):
    """On a rank: what refuses each list of overrides."""
    from megatron_dsv41.backends.megatron import launch, run_checks

    launch.prepare_process()
    found = []
    for overrides in cases:
        with pytest.raises(ValueError) as error:
            run = tiny_run(folder, *SMOOTH, *overrides)
            run_checks.check(run.legs[0])
        found.append(str(error.value))
    return found


def test_impossible_owners_are_refused(home):
    cases = {
        ("parallel.engram=2",): "parallel.engram 2 does not divide 3 processes: groups of equal size own the tables; "
        "set it to one of 1, 3",
        ("parallel.engram=0",): "parallel.engram must be at least 1, got 0",
        ("engram.table=float8",): "engram.* is about tables with owners: set parallel.engram to their number",
        ("parallel.engram=3", "model.overrides.engram_layer_ids=[]", "model.overrides.engram_num_embeddings=[]"): (
            "parallel.engram 3: the model has no Engram tables; leave the setting out"
        ),
    }
    for found in run_ranks(messages, 3, home, *cases):
        for message, expected in zip(found, cases.values(), strict=True):
            assert message.startswith(expected), message
