"""What pipeline stages hold and send: states of in-flight micro-batches and no others, bytes as the plan says."""

import gc
from pathlib import Path

import pytest

from megatron_dsv41.testing.distributed import run_ranks

CASE = Path(__file__).parents[2] / "data" / "parity" / "text_fp32"
MICRO_BATCHES = 8


def make_job(text):
    """On a rank: one forward and backward of eight micro-batches, not yet run."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.parity import LayoutJob, parse_layout
    from megatron_dsv41.phase import Phase
    from megatron_dsv41.testing.parity import ParityCase

    layout = parse_layout(text)
    launch.create_groups(layout.parallel)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    phase = Phase(balance_loss_weight=0.0, index_loss="sparse")
    job = LayoutJob(ParityCase.load(CASE), layout, phase, {}, groups)
    job.rows = [job.rows[0]] * MICRO_BATCHES
    return job


def live_states(text):
    """(pipeline rank, states seen, most micro-batches with a live state at once, number of them after the step)."""
    from torch.multiprocessing.reductions import StorageWeakRef

    job = make_job(text)
    states, most = {}, 0

    def alive():
        return sum(any(not reference.expired() for reference in found) for found in states.values())

    def remember(module, inputs, output):
        # Storages and not tensors: autograd keeps a tensor alive without its Python object.
        stores = [StorageWeakRef(t.untyped_storage()) for t in output[2].to_tensors() if t is not None]
        states.setdefault(len(states) if module is first else len(states) - 1, []).extend(stores)

    blocks = list(job.stages[0].layers.values())
    first = blocks[0]
    for block in blocks:
        block.register_forward_hook(remember)
    forward = job._forward

    def counted(feed, chunk):
        nonlocal most
        result = forward(feed, chunk)
        gc.collect()
        most = max(most, alive())
        return result

    job._forward = counted
    job.step()
    job._forward = forward
    gc.collect()
    return job.groups.pp.rank(), sum(map(len, states.values())), most, alive()


@pytest.mark.parametrize(
    "text",
    ["pp=2,layout=Ettttt|tttL", "pp=4", "pp=2,layout=Ettttt|tttL,recompute", "pp=2,layout=Ettttt|tttL,recompute=full"],
)
def test_states_live_as_long_as_their_micro_batch(text):
    world = 4 if text == "pp=4" else 2
    found = run_ranks(live_states, world, text)
    for rank, seen, most, left in found:
        in_flight = world - rank  # of 1F1B
        # Recomputed layers keep whole states; others what their operations read of them, which may be other tensors.
        assert most == in_flight if text.endswith("recompute") else most <= in_flight, (rank, most)
        assert seen >= MICRO_BATCHES or rank == 0  # the first two layers share nothing
        assert left == 0
    assert found[-1][2] == 1


def sent_bytes(text):
    """Bytes that this rank sent back and forward in one step, and what the plan says."""
    import torch.distributed as dist

    job = make_job(text)
    rank = job.groups.pp.rank()
    sent = {rank - 1: 0, rank + 1: 0}
    stock = dist.batch_isend_irecv

    def counted(operations):
        for operation in operations:
            if operation.op is dist.isend:
                sent[dist.get_group_rank(job.groups.pp, operation.peer)] += operation.tensor.nbytes
        return stock(operations)

    dist.batch_isend_irecv = counted
    job.step()

    def expected(crossing, what):
        return getattr(crossing, what) * MICRO_BATCHES if crossing else 0

    before, after = job.boundaries.before(rank), job.boundaries.after(rank)
    planned = {rank - 1: expected(before, "backward_bytes"), rank + 1: expected(after, "forward_bytes")}
    return sent, planned


def test_bytes_on_the_wire_are_those_of_the_plan():
    for sent, planned in run_ranks(sent_bytes, 4, "pp=4,layout=Ett|ttt|t|ttL"):
        assert sent == planned
