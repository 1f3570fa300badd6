"""Chrome traces: written by hand as those of GPUs look, and recorded over gloo, where bytes are those of the plan."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_dsv41.experiments import traces
from megatron_dsv41.testing.distributed import run_ranks

CASE = Path(__file__).parents[1] / "data" / "parity" / "text_fp32"


def event(name, category, begin, length, tid=1, **args):
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": length, "tid": tid, "pid": 1, "args": args}


def call(group, sent, begin=0.0, tid=1, message=False):
    named = traces.Call(group, (0, 1), message, sent).range_name()
    return event(named, "user_annotation", begin, 1, tid)


def written(path, events, base=5_000_000):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "baseTimeNanoseconds": base}).encode()))
    return path


def test_kernels_by_their_groups(tmp_path):
    """Times in microseconds in the file, in milliseconds since the epoch when read."""
    named = {"Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP", "Process Group Ranks": "[0, 1]"}
    events = [
        event(traces.STEP, "user_annotation", 1000, 9000),
        event(traces.STEP, "gpu_user_annotation", 1000, 9000),
        event("gemm", "kernel", 500, 100),  # of the step before
        event("gemm", "kernel", 1500, 1000, stream=7),
        event("Memset (Device)", "gpu_memset", 2500, 10),
        event("ncclDevKernel_ReduceScatter_Sum_f32", "kernel", 2000, 4000, **named),
        # Messages that were posted together: the kernel says nothing, its launch follows the thread's last call.
        call("PIPELINE_MODEL_PARALLEL_GROUP", 1024, 1100, message=True),
        event("cudaLaunchKernelExC", "cuda_runtime", 1200, 5, correlation=42),
        call("TENSOR_MODEL_PARALLEL_GROUP", 128, 1150, tid=2),
        event("ncclDevKernel_SendRecv", "kernel", 7000, 500, tid="stream 9", correlation=42),
        call("CONTEXT_PARALLEL_GROUP", 64, 1300),
        call("CONTEXT_PARALLEL_GROUP", 32, 1400, message=True),
        call("EXPERT_MODEL_PARALLEL_GROUP", 16, 1500),
        call("default_pg", 8, 1600),
        call("EXPERT_MODEL_PARALLEL_GROUP", 16, 500),
        {"ph": "f", "name": "ac2g"},
    ]
    trace = traces.read_trace(written(tmp_path / "t.json.gz", events))
    assert (trace.begin, trace.end) == (pytest.approx(6.0), pytest.approx(15.0))
    assert [(s.kind, s.members, round(s.begin, 6), round(s.end, 6)) for s in trace.spans] == [
        ("", (), 6.5, 7.5),
        ("", (), 7.5, 7.51),
        ("DP reduce", (0, 1), 7.0, 11.0),
        ("PP payload", (0, 1), 12.0, 12.5),
    ]
    expected = {"PP payload": 1024, "TP": 128, "CP gather": 64, "CP halo": 32, "EP exchange": 16, "other": 8}
    assert trace.sent == expected


def test_sums_of_gradients_over_the_tensor_group_are_no_traffic_of_sites(tmp_path):
    events = [
        event(traces.STEP, "user_annotation", 0, 1000),
        event(traces.GRADIENTS, "user_annotation", 500, 300),
        call("TENSOR_MODEL_PARALLEL_GROUP", 100, 100),
        call("TENSOR_MODEL_PARALLEL_GROUP", 7, 600),
        call("PIPELINE_MODEL_PARALLEL_GROUP", 10, 610),  # no payload
        event("cudaLaunchKernelExC", "cuda_runtime", 601, 1, correlation=1),
        event("ncclDevKernel_AllReduce", "kernel", 700, 50, correlation=1),
    ]
    trace = traces.read_trace(written(tmp_path / "t.json.gz", events))
    assert trace.sent == {"TP": 100, "TP gradients": 7, "other": 10}
    assert [span.kind for span in trace.spans] == ["TP gradients"]


def test_a_trace_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no range"):
        traces.read_trace(written(tmp_path / "t.json.gz", []))


def recorded(folder, text):
    """On a rank: one profiled step of a parity case; bytes by kind as the trace says, and the plan's by axis."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.layouts import crossing_planner
    from megatron_dsv41.backends.megatron.parity import LayoutJob, parse_layout
    from megatron_dsv41.experiments.communication import Stage, context_traffic, pipeline_traffic, tensor_traffic
    from megatron_dsv41.layer_plan import plan_layers
    from megatron_dsv41.phase import Phase
    from megatron_dsv41.testing.parity import ParityCase
    from megatron_dsv41.testing.wire import WireMeter

    layout, rank = parse_layout(text), torch.distributed.get_rank()
    launch.create_groups(layout.parallel)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    job = LayoutJob(ParityCase.load(CASE), layout, Phase(), {}, groups)
    finalize, job._finalize = job._finalize, lambda *args, **kwargs: marked(finalize, *args, **kwargs)
    path = Path(folder) / f"{text}-{rank}.json.gz"
    activities = [torch.profiler.ProfilerActivity.CPU]
    counted, whole = WireMeter(ranges=True).running(), torch.profiler.record_function(traces.STEP)
    with torch.profiler.profile(activities=activities) as profile, counted, whole:
        job.step()
    profile.export_chrome_trace(str(path))
    lengths = crossing_planner(job.case.config, Phase(), layout.parallel, 1, job.rows[0][1].shape[1]).lengths
    model, rows = job.stages[0], len(job.rows)
    stage = Stage([plan_layers(job.case.config)[layer] for layer in model.stage], model.before, model.after)
    planned = {
        "tp": tensor_traffic(job.case.config, Phase(), lengths, stage),
        "cp": context_traffic(job.case.config, Phase(), lengths, stage),
        "pp": pipeline_traffic(stage),
    }
    trace = traces.read_trace(path)
    sent = {axis: sum(trace.sent.get(kind, 0.0) for kind in kinds) for axis, kinds in AXES.items()}
    return sent, {axis: rows * (t.forward + t.backward) for axis, t in planned.items()}, len(trace.spans)


def marked(finalize, *args, **kwargs):
    import torch

    with torch.profiler.record_function(traces.GRADIENTS):
        finalize(*args, **kwargs)


AXES = {"tp": (traces.TENSOR,), "cp": (traces.GATHER, traces.HALO), "pp": (traces.PIPELINE,)}


@pytest.mark.parametrize("text", ["tp=2,sp", "cp=2", "pp=2"])
def test_a_recorded_step_sent_what_the_plan_says(tmp_path, text):
    ranks = run_ranks(recorded, 2, tmp_path, text)
    axis = text[:2]
    assert sum(sent[axis] for sent, _, _ in ranks) == pytest.approx(sum(planned[axis] for _, planned, _ in ranks))
    assert all(spans > 100 for _, _, spans in ranks)
    assert all(not sent[other] for sent, _, _ in ranks for other in AXES if other != axis)
