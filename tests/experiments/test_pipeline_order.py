"""The order of passes on every rank of a pipeline, and what waits for its backward pass meanwhile."""

import types
from collections import Counter

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.activations import (
    activation_bytes,
    gradient_working_bytes,
    head_working_bytes,
    layer_working_bytes,
)
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.experiments.pipeline_order import pipeline_order, waiting_chunks
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.run_config import run_from_dict
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

# pipeline, virtual, micro-batches, turn
SCHEDULES = [
    (1, 1, 3, None),
    (2, 1, 1, None),
    (4, 1, 9, None),
    (2, 2, 2, None),
    (2, 2, 8, None),
    (4, 2, 4, None),
    (4, 3, 12, None),
    (2, 2, 8, 4),
    (4, 2, 14, 5),
]


def of_megatron(stage, pipeline, virtual, micro_batches, turn):
    """The same order, put together from Megatron's own numbers."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    group = types.SimpleNamespace(size=lambda: pipeline, rank=lambda: stage)
    interleaved = virtual if virtual > 1 else None
    here = types.SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=interleaved)
    total, _, ahead, remaining = get_pp_rank_microbatches(
        micro_batches, virtual, turn or pipeline, p2p_communicator=here
    )
    table = [chunk for _, chunk in get_schedule_table(micro_batches, virtual, turn or pipeline)]
    passes = [(True, chunk) for chunk in table[:ahead]]
    for number in range(remaining):
        passes += [(True, table[ahead + number]), (False, virtual - 1 - table[number])]
    return passes + [(False, virtual - 1 - table[number]) for number in range(remaining, total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_is_megatrons(schedule):
    for stage in range(schedule[0]):
        assert list(pipeline_order(stage, *schedule)) == of_megatron(stage, *schedule)


def simulate(pipeline, virtual, micro_batches, turn):
    """Run all ranks, each pass as soon as its input is there. Per rank: chunk and waiting ones at backward passes."""
    orders = [list(pipeline_order(stage, pipeline, virtual, micro_batches, turn)) for stage in range(pipeline)]
    last = pipeline * virtual - 1
    done, position, found = Counter(), [0] * pipeline, [[] for _ in range(pipeline)]
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            is_forward, chunk = order[position[stage]]
            place = chunk * pipeline + stage  # among all chunks of the model
            if is_forward:
                ready = place == 0 or done[True, place - 1] > done[True, place]
            else:
                ready = done[True, place] > done[False, place]
                ready = ready and (place == last or done[False, place + 1] > done[False, place])
            if not ready:
                continue
            if not is_forward:
                own = range(stage, pipeline * virtual, pipeline)
                found[stage].append((chunk, tuple(done[True, other] - done[False, other] for other in own)))
            done[is_forward, place] += 1
            position[stage], moved = position[stage] + 1, True
        assert moved, f"every rank waits for another one at {position}"
    assert set(done.values()) == {micro_batches} and len(done) == 2 * (last + 1)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_pipeline_keeps_what_is_counted(schedule):
    for stage, found in enumerate(simulate(*schedule)):
        assert found == list(waiting_chunks(pipeline_order(stage, *schedule), schedule[1]))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("cut", ["Et|t|ttttt|tL", "Ettttt|t|t|tL", "Et|ttttt|t|tL", "E|ttt|ttttt|L", "Et||ttttt|ttL"])
@pytest.mark.parametrize(("micro_batches", "turn"), [(2, None), (8, None), (8, 4)])
def test_chunks_of_unequal_length_wait_as_often_as_they_do(cut, recompute, micro_batches, turn):
    """A long chunk that runs first waits longer than one of its length that runs last."""
    config, tokens = presets.tiny(), 64
    layout = Layout(
        pipeline=2,
        virtual=2,
        turn=turn,
        cut=cut,
        num_micro_batches=micro_batches,
        seq_length=tokens,
        recompute=recompute,
    )
    keeps = [activation_bytes(config, recompute, plan) for plan in plan_layers(config)]
    everything = [activation_bytes(config, "none", plan) for plan in plan_layers(config)]
    for stage, passes in enumerate(simulate(2, 2, micro_batches, turn)):
        chunks, most = layout.stage_chunks(8)[stage], 0.0
        for running, waiting in passes:
            kept = working = 0.0
            for place, (chunk, number) in enumerate(zip(chunks, waiting, strict=True)):
                received = 0.0 if (stage, place) == (0, 0) else activation_bytes(config, "full")
                own = sum(keeps[layer] for layer in (chunk[:1] if recompute == "full" else chunk))
                kept += number * (own if chunk else received)
            again = [everything[layer] - keeps[layer] for layer in chunks[running]]
            if again:
                working = layer_working_bytes(config) + max(again)
            if again and recompute == "full":
                working = layer_working_bytes(config) + sum(again) + (len(again) - 1) * keeps[0]
            if (stage, running) == (1, 1):
                working = max(working, head_working_bytes(config, whole_logits=True))
            most = max(most, kept + working)
        found = memory_per_rank(config, layout)[stage].activations
        assert found == pytest.approx(tokens * most + gradient_working_bytes(config, config.n_routed_experts))


def test_a_run_may_set_the_turn_of_a_chunk():
    values = {
        "model": {"preset": "tiny"},
        "data": {"train": "x", "seq_length": 64},
        "batch": {"sequences": 8},
        "train": {"steps": 1},
        "checkpoint": {"folder": "x"},
        "parallel": {"pp": 2, "vpp": 2},
    }
    name = "microbatch-group-size-per-virtual-pipeline-stage"
    for spelled in (name, name.replace("-", "_")):
        assert Layout.of(run_from_dict(values, (f"megatron.{spelled}=4",)), 2).turn == 4
    assert Layout.of(run_from_dict(values), 2).turn is None


def passes_of_a_step(folder, *overrides):
    """On a rank: (is forward, chunk of the rank) of the passes of a step, as Megatron makes them."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_dsv41.backends.megatron.train import train

    forward, backward = schedules.forward_step, schedules.backward_step
    found, chunk_of = [], {}

    def forward_step(*args, vp_stage=None, **kwargs):
        output = forward(*args, vp_stage=vp_stage, **kwargs)
        chunk_of[id(output[0])] = vp_stage, output[0]  # kept, so that no other tensor gets this number
        found.append((True, vp_stage))
        return output

    def backward_step(input_tensor, output_tensor, *args):
        found.append((False, chunk_of[id(output_tensor)][0]))
        return backward(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    assert train(tiny_run(folder, *overrides)) == 0
    return found


@pytest.mark.ranks(2)
def test_a_training_step_takes_this_order(tmp_path):
    tiny_run(tmp_path)
    settings = ("parallel.pp=2", "parallel.vpp=2", "parallel.layout=Et|t|ttttt|tL", "batch.micro=1", "train.steps=1")
    for stage, found in enumerate(run_ranks(passes_of_a_step, 2, tmp_path, *settings)):
        assert found == list(pipeline_order(stage, 2, 2, 4))
