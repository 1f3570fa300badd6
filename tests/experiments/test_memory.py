import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.activations import (
    Division,
    activation_bytes,
    gradient_working_bytes,
    head_working_bytes,
    layer_working_bytes,
)
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.run_config import run_from_dict


def test_virtual_chunks_go_around_the_pipeline():
    layout = Layout(pipeline=2, virtual=2)
    assert layout.stage_layers(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Layout(pipeline=2, virtual=2, cut="E|tt|ttt|tttL").stage_layers(8) == ((2, 3, 4), (0, 1, 5, 6, 7))


def test_flash_weights_gradients_and_optimizer_at_a_known_layout():
    """One stage of 64 experts groups: 39.7 GB of bf16 weights beside replicated dense parts."""
    layout = Layout(data=64, expert=64, engram=64, num_micro_batches=8)
    (stage,) = memory_per_rank(presets.flash(), layout)
    experts, tables = 543_581_798_400 // 64, 196_613_849_600 / 64
    dense = 552_366_103_664 - 543_581_798_400 - 485_268_480
    assert stage.parameters == pytest.approx(dense + experts + tables, abs=1)
    assert stage.weights == stage.parameters * 2
    assert stage.gradients == stage.parameters * 4
    assert stage.optimizer == pytest.approx(12 * (dense / 64 + experts + tables), rel=1e-9)


def test_earlier_stages_wait_for_more_micro_batches():
    config = presets.tiny()
    plans = plan_layers(config)
    layout = Layout(pipeline=2, num_micro_batches=8, seq_length=64)
    first, second = (stage.activations for stage in memory_per_rank(config, layout))
    half = [64 * sum(activation_bytes(config, "none", plan) for plan in plans[4 * stage :][:4]) for stage in (0, 1)]
    gradient = gradient_working_bytes(config, config.n_routed_experts)
    assert first == 2 * half[0] + 64 * layer_working_bytes(config) + gradient
    working = max(layer_working_bytes(config), head_working_bytes(config, whole_logits=True))
    assert second == half[1] + 64 * working + gradient


def test_gathered_tokens_count_where_they_are_more_than_what_experts_need():
    config = presets.tiny()
    inner, row = 3 * 64, 128  # elements of products and of a gathered token
    for copies, more in ((1, 0), (2, 2 * row - inner), (16, 16 * row - inner)):
        gathered = layer_working_bytes(config, Division(gathered=copies))
        assert gathered - layer_working_bytes(config) == 4 * more
    layouts = [Layout(data=16, pipeline=2, expert=8, gathered=gathered) for gathered in (False, True)]
    first = [memory_per_rank(config, layout)[0].activations for layout in layouts]
    assert first[1] - first[0] == 4096 * 4 * (8 * row - inner)


def test_a_run_gathers_where_auto_says_so():
    values = {
        "model": {"preset": "tiny"},
        "data": {"train": "x", "seq_length": 64},
        "batch": {"sequences": 4},
        "train": {"steps": 1},
        "checkpoint": {"folder": "x"},
    }
    sizes = {ep: Layout.of(run_from_dict(values, (f"parallel.ep={ep}",)), 4).gathered for ep in (1, 2, 4)}
    assert sizes == {1: False, 2: True, 4: False}  # two experts for a token


@pytest.mark.parametrize("cut", ["Et|t|ttttt|tL", "Et|ttttt|t|tL"])
def test_a_whole_chunk_is_made_again_at_once(cut):
    config, tokens = presets.tiny(), 64
    layout = Layout(pipeline=2, virtual=2, cut=cut, num_micro_batches=4, seq_length=tokens, recompute="full")
    everything = [activation_bytes(config, "none", plan) for plan in plan_layers(config)]
    stream = activation_bytes(config, "full")
    gradient, working = gradient_working_bytes(config, config.n_routed_experts), layer_working_bytes(config)
    for stage, (waiting, chunks) in enumerate(zip((5, 3), layout.stage_chunks(8), strict=True)):
        largest = max(sum(everything[layer] for layer in chunk) for chunk in chunks)
        backward = working + largest - stream
        if stage == 1:
            backward = max(backward, head_working_bytes(config, whole_logits=True))
        found = memory_per_rank(config, layout)[stage].activations
        assert found == pytest.approx(tokens * (waiting * stream + backward) + gradient)


@pytest.mark.parametrize("recompute", ["none", "selective", "block", "full"])
def test_a_stage_may_have_no_layers(recompute):
    config = presets.tiny()
    (first, _), (_, last) = (
        memory_per_rank(config, Layout(pipeline=2, cut=cut, seq_length=64, recompute=recompute))
        for cut in ("E|ttttttttL", "Etttttttt|L")
    )
    table = config.vocab_size * config.hidden_size
    assert (first.parameters, first.activations) == (table, 0)
    assert last.parameters == table + config.hidden_size
    assert last.activations == 64 * head_working_bytes(config, whole_logits=True)


LAYOUTS = [
    Layout(),
    Layout(tensor=2, sequence=True, expert=2, gathered=True),
    Layout(tensor=2, expert_tensor=2, context=2),
    Layout(pipeline=2, cut="Et|tttttttL", num_micro_batches=8),
    Layout(pipeline=2, virtual=2, cut="Et|t|tttttt|L", num_micro_batches=1),
    Layout(pipeline=4, virtual=2, num_micro_batches=8, whole_logits=False),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", ["tiny", "proxy", "flash"])
def test_more_that_is_made_again_never_needs_more(preset, layout):
    config = presets.PRESETS[preset]()
    if layout.cut is not None and config.num_hidden_layers != 8:
        layout = dataclasses.replace(layout, cut=None)
    none, selective, block, full = (
        [stage.activations for stage in memory_per_rank(config, dataclasses.replace(layout, recompute=kind))]
        for kind in ("none", "selective", "block", "full")
    )
    for stage in range(layout.pipeline):
        assert 0 < block[stage] <= selective[stage] <= none[stage]
        assert 0 < full[stage] <= none[stage]


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="layout.data must be at least 1, got 0"):
        Layout(data=0)
