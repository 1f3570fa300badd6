import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.activations import (
    activation_bytes,
    gradient_working_bytes,
    head_working_bytes,
    layer_working_bytes,
)
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.layer_plan import plan_layers


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


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="layout.data must be at least 1, got 0"):
        Layout(data=0)
