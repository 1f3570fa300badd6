import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments import activations
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.ops.head import blocked

GIB = 2**30


@pytest.mark.parametrize(("tokens", "measured"), [(4096, 17.8), (16_384, 69.1)])
def test_the_plan_is_within_5_percent_of_the_proxy_on_a_gpu(tokens, measured):
    """As measured with `tools/bench_step.py` on one H200, GiB above weights and gradients (docs/benchmarks.md)."""
    (stage,) = memory_per_rank(presets.proxy(), Layout(seq_length=tokens, whole_logits=False))
    assert stage.activations / GIB == pytest.approx(measured, rel=0.05)


def test_recompute_keeps_less():
    flash = presets.flash()
    everything, selective, block = (
        activations.activation_bytes(flash, kind) for kind in ("none", "selective", "block")
    )
    assert block == 4 * 5120 * 2
    assert everything - selective == 3 * 64 * 512 * 2
    assert block < selective < everything


def test_only_layers_with_engram_keep_rows():
    proxy = presets.proxy()
    kept = [activations.activation_bytes(proxy, "none", plan) for plan in plan_layers(proxy)]
    assert [kept[layer] > kept[0] for layer in range(8)] == [layer in proxy.engram_layer_ids for layer in range(8)]
    assert kept[1] - kept[0] == 2 * (24 * 256 + 9 * 5120)


def test_a_blocked_head_needs_no_whole_logits():
    flash = presets.flash()
    whole, blocks = (activations.head_working_bytes(flash, whole) for whole in (True, False))
    assert whole == 8 * flash.vocab_size
    assert blocks < whole / 5
    assert blocked.BLOCK == activations.HEAD_BLOCK


def test_tensor_parallelism_divides_what_it_cuts():
    flash = presets.flash()
    whole = activations.activation_bytes(flash, "none")
    cut = activations.activation_bytes(flash, "none", divided=activations.Division(tensor=4, expert_tensor=4))
    sharded = activations.activation_bytes(flash, "none", divided=activations.Division(4, 4, 4))
    wide = 3 * 64 * 512 + 8 * 1024 + 3 * 7 * 2304
    assert whole - cut == 2 * wide * 3 / 4  # inputs of sites and of experts are whole on every rank
    assert cut - sharded == 2 * 12 * 5120 * 3 / 4  # four streams twice, two inputs and two outputs
    own_experts = activations.activation_bytes(flash, "none", divided=activations.Division(4, 4, expert_tensor=1))
    assert sharded - own_experts == 2 * 6 * 5120 * 3 / 4
