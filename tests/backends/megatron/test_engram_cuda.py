"""Owned tables on two GPUs: exchanges run beside other work, and no forward or backward pass waits for the host."""

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny import identity_map, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]
LAYERS, DIM = (1, 3), 256
SETTINGS = dict(engram_head_dim=DIM, engram_vocab_size=15_000, engram_num_embeddings=(100_000, 100_000))
MICRO, TOKENS = 4, 2048


def opened(**settings):
    """On a rank: an exchange of float8 tables with two owners, through the Triton providers."""
    from megatron_dsv41.backends.megatron.engram import EngramExchange
    from megatron_dsv41.backends.megatron.engram_tables import EngramGroups, OwnedTable
    from megatron_dsv41.backends.megatron.layout import Layout
    from megatron_dsv41.modules.engram import EngramHash
    from megatron_dsv41.ops.engram.rows import RowFormat
    from megatron_dsv41.ops.registry import Ops

    config, form, ops = tiny_config(**SETTINGS), RowFormat("float8", DIM), Ops({"engram": "triton"})
    device, groups = torch.device("cuda", torch.cuda.current_device()), EngramGroups.create(2, LAYERS)
    tables = {
        layer: OwnedTable(layer, config.engram_rows(layer), form, torch.float32, groups, device, ops=ops)
        for layer in groups.holders
    }
    for owned in tables.values():
        owned.fill(lambda rows, layer=owned.layer: whole(layer)[rows])
    hashing = EngramHash(config, identity_map(config).to(device), ops["engram.hash"])
    return EngramExchange(
        hashing, Layout(), groups, tables, LAYERS, form, dtype=torch.bfloat16, gradient_scale=0.5, ops=ops, **settings
    )


def whole(layer):
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(100_000, DIM, generator=generator)


def batches(step):
    from megatron_dsv41.ops.documents import documents_from_ids

    generator, found = torch.Generator().manual_seed(10 * step + dist.get_rank()), []
    for _ in range(MICRO):
        ids = torch.randint(3, 90, (1, TOKENS), generator=generator)
        document, no = torch.arange(TOKENS)[None] // 700, torch.zeros(1, TOKENS, dtype=torch.bool)
        found.append((ids.cuda(), documents_from_ids(document.cuda(), ~no.cuda(), no.cuda())))
    return found


def compute(milliseconds):
    """Matrix products on the current stream, about so long."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(int(milliseconds / 0.2)):
        x = (x @ x).clamp(-1, 1)
    return x


def stepped(windows):
    """On a rank: two steps; whether lookups were right, and the sums of the gradients of the second."""
    exchange = opened(window=windows)
    tables = {layer: whole(layer).cuda() for layer in LAYERS}
    decoded = {layer: exchange.form.decode(exchange.form.encode(t), torch.bfloat16) for layer, t in tables.items()}
    right = True
    ahead = exchange.announce(batches(0), training=True)
    for step in range(2):
        rows, ahead = ahead, None
        exchange.begin(rows)
        if step == 0:
            exchange.upcoming = ahead = exchange.announce(batches(1), training=True)
        numbers = [exchange.hash(ids.flatten(), documents) for ids, documents in batches(step)]
        found = []
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # of a host that waits for the device
        for number, fetched in enumerate(rows.batches):
            exchange.reached(rows, number)
            for layer in LAYERS:
                values = fetched[layer].read()
                found.append((values, decoded[layer][numbers[number][layer]]))
                values.backward(torch.full_like(values, 1 + number))
        torch.cuda.set_sync_debug_mode("default")
        right = right and all(torch.equal(*pair) for pair in found)
        exchange.start_return()
        exchange.finish_return()
        exchange.tables_changed()
    return right, {layer: owned.master.grad.coalesce().values().sum().item() for layer, owned in exchange.owned.items()}


@pytest.mark.parametrize("windows", [None, 1])
def test_lookups_are_exact_and_no_pass_waits_for_the_host(windows):
    ranks = run_ranks(stepped, 2, windows, device="cuda")
    assert ranks == run_ranks(stepped, 2, windows, device="cuda")  # bitwise, so far as a sum shows it
    for layer in LAYERS:
        total = sum(sums[layer] for _, sums in ranks)
        columns = tiny_config(**SETTINGS).engram_columns
        # Two ranks, half each; micro-batch n has gradients of 1 + n.
        assert total == pytest.approx(TOKENS * columns * DIM * sum(range(1, MICRO + 1)), rel=1e-5)
    assert all(right for right, _ in ranks)


def overlapped():
    """On a rank: when device work of each kind ran (begin, end in microseconds), and the fetch times of every step."""
    from megatron_dsv41.backends.megatron.engram_window import FETCH, RETURN

    exchange, dense = opened(), torch.randn(1 << 27, device="cuda")
    times = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as p:
        for _ in range(3):
            step = exchange.upcoming = exchange.announce(batches(0), training=True)
            torch.cuda.synchronize()
            exchange.tables_changed()
            compute(20)  # the rest of the optimizer's step, and the first layers
            exchange.begin(step)
            for fetched in step.batches:
                for layer in LAYERS:
                    fetched[layer].read().sum().backward()
            exchange.start_return()
            dist.all_reduce(dense)
            exchange.finish_return()
            times.append({key: float(value) for key, value in exchange.milliseconds().items()})
    events = [
        (event.name(), event.start_ns() / 1e3, event.end_ns() / 1e3)
        for event in p.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    ]
    kinds = {"fetch": FETCH, "return": RETURN, "dense": "AllReduce", "compute": "gemm", "rows": "SendRecv"}
    spans = {
        kind: [e[1:] for e in events if text in e[0] or (kind == "compute" and "nvjet" in e[0])]
        for kind, text in kinds.items()
    }
    return spans, times


def shared_us(some, others):
    """Microseconds in which one of `some` and one of `others` run."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def test_exchanges_run_beside_other_work():
    for spans, times in run_ranks(overlapped, 2, device="cuda"):
        total = {kind: round(sum(b - a for a, b in found)) for kind, found in spans.items()}
        fetched = shared_us(spans["rows"], spans["compute"])
        returned = shared_us(spans["rows"], spans["dense"])
        print(f"us: {total}, rows beside products {fetched:.0f}, beside the dense reduction {returned:.0f}; {times}")
        assert spans["fetch"] and spans["return"]  # ranges show on the device
        assert fetched > 0 and returned > 0
        assert times[-1]["engram_fetch_exposed_ms"] < 0.2 < times[-1]["engram_fetch_hidden_ms"]


def updated():
    """On a rank: the largest error of its rows after two updates, and the largest value of the whole table in fp64."""
    from megatron_dsv41.ops.registry import load
    from megatron_dsv41.ops.row_blocks import row_sparse
    from megatron_dsv41.ops.sinkhorn.ref import sinkhorn_update
    from megatron_dsv41.optim.groups import Algorithm
    from megatron_dsv41.optim.optimizer import MixedOptimizer, Place
    from megatron_dsv41.optim.settings import Optimizer

    rows, cut = 3001, 1000
    mine = slice(0, cut) if dist.get_rank() == 0 else slice(cut, rows)
    exact, momentum = torch.zeros(rows, DIM, dtype=torch.float64), torch.zeros(rows, DIM, dtype=torch.float64)
    master = torch.nn.Parameter(exact[mine].float().cuda())
    group = {"params": [master], "places": [Place(total_rows=rows, row_groups=(dist.group.WORLD,))], "lr": 1.0}
    group |= {"algorithm": Algorithm.SINKHORN}
    optimizer = MixedOptimizer([group], Optimizer(name="published"), load("sinkhorn.update", "triton"))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(rows, DIM, generator=generator) * torch.rand(rows, 1, generator=generator) ** 3
        grad[:: 3 + step] = 0
        sinkhorn_update(exact, grad.double(), momentum, lr=1.0)
        ids = grad[mine].any(1).nonzero()[:, 0]
        master.grad = row_sparse(ids.cuda(), grad[mine][ids].cuda(), len(master))
        optimizer.step()
    return float((master.detach().double().cpu() - exact[mine]).abs().max()), float(exact.abs().max())


def test_owners_update_as_the_whole_table():
    for error, moved in run_ranks(updated, 2, device="cuda"):
        assert error <= 1e-6 * moved
