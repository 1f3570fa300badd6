"""What a plan says about communication is what goes over the wire."""

from pathlib import Path

import pytest

from megatron_dsv41.testing.distributed import run_ranks

CASE = Path(__file__).parents[1] / "data" / "parity" / "text_fp32"


def traffic(text, index_loss):
    """On a rank: bytes sent over its tensor, context, expert and pipeline groups in one step, and the plan's."""
    import sys

    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.layouts import crossing_planner
    from megatron_dsv41.backends.megatron.parity import LayoutJob, parse_layout
    from megatron_dsv41.experiments.communication import (
        Stage,
        context_traffic,
        expert_traffic,
        pipeline_traffic,
        tensor_traffic,
    )
    from megatron_dsv41.layer_plan import plan_layers
    from megatron_dsv41.phase import Phase
    from megatron_dsv41.testing.parity import ParityCase
    from megatron_dsv41.testing.wire import WireMeter

    layout = parse_layout(text)
    launch.create_groups(layout.parallel)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    phase = Phase(index_loss=index_loss)
    job = LayoutJob(ParityCase.load(CASE), layout, phase, {}, groups)
    # Gradients of parameters are not what is counted. (The package hides the module behind a function of its name.)
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize.finalize_model_grads = lambda *args, **kwargs: None
    meter = WireMeter()
    with meter.running():
        job.step()

    case, rows = job.case, len(job.rows)
    lengths = crossing_planner(case.config, phase, layout.parallel, 1, job.rows[0][1].shape[1]).lengths
    model = job.stages[0]
    stage = Stage([plan_layers(case.config)[layer] for layer in model.stage], model.before, model.after)
    planned = {
        "tp": tensor_traffic(case.config, phase, lengths, stage),
        "cp": context_traffic(case.config, phase, lengths, stage),
        "ep": expert_traffic(case.config, layout.parallel, lengths, stage),
        "pp": pipeline_traffic(stage),
    }
    found = {axis: meter.sent(getattr(groups, axis)) for axis in planned}
    return groups.pp.rank(), found, {axis: rows * (t.forward + t.backward) for axis, t in planned.items()}


@pytest.mark.parametrize(
    ("text", "index_loss"),
    [
        ("tp=2", "sparse"),
        ("cp=2", "sparse"),
        ("tp=2,sp,pp=2,layout=Ettttt|tttL,shadows=always", "dense"),
        ("cp=2,pp=2,layout=Ettt|tttttL", "off"),
        ("ep=2", "off"),
        ("tp=2,sp,ep=2,dp=2", "off"),
        ("tp=2,sp,ep=2,etp=2", "off"),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_plan(text, index_loss):
    from megatron_dsv41.backends.megatron.parity import parse_layout

    ranks = run_ranks(traffic, parse_layout(text).world_size, text, index_loss)
    axes = [axis for axis in ("tp", "cp", "ep", "pp") if f"{axis}=" in text]
    for stage in {stage for stage, _, _ in ranks}:
        for axis in axes:
            # Halos have no neighbour at the edges: the plan's number is the average over a group.
            found = sum(found[axis] for where, found, _ in ranks if where == stage)
            planned = sum(planned[axis] for where, _, planned in ranks if where == stage)
            assert found == pytest.approx(planned, rel=1e-12) and found > 0, (stage, axis, found / planned)


def test_the_routing_decides_what_an_all_to_all_sends():
    from megatron_dsv41 import presets
    from megatron_dsv41.experiments.communication import Stage, Traffic, expert_traffic
    from megatron_dsv41.parallel.payload import Lengths
    from megatron_dsv41.run_config import Parallel

    stage, lengths = Stage([], None, None), Lengths(1, 64)
    found = [
        expert_traffic(presets.tiny(), parallel, lengths, stage)
        for parallel in (Parallel(), Parallel(ep=2), Parallel(ep=4), Parallel(ep=2, dispatcher="alltoall"))
    ]
    assert found == [Traffic(), Traffic(), None, None]  # of no layers; tiny chooses two experts for a token
