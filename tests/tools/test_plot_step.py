"""Kernels to components, and floors by hand."""

import plot_step
import pytest

from megatron_dsv41 import presets


def test_every_kernel_counts_once():
    kernels = {"nvjet_sm90_tss_64": 1.0, "nvjet_sm90_tst_64": 2.0, "attend_forward": 4.0, "something new": 8.0}
    took = plot_step.components(kernels)
    assert sum(took.values()) == 15.0 and list(took)[0] == "all else"
    assert (took["head products"], took["dense linears"], took["sparse attention"]) == (1.0, 2.0, 4.0)


def test_instances_of_templates_count_to_their_components():
    """The profiler writes their types and arguments."""
    names = ("attend_backward<false, 4>", "site_forward<true, 5120>", "fn_gradient<4>", "sum_gradients<384>")
    took = plot_step.components({f"void {name}(unsigned short const*, int)": 1.0 for name in names})
    assert (took["sparse attention"], took["mHC"]) == (1.0, 3.0)


def test_floors_by_hand(tmp_path):
    config = presets.PRESETS["proxy"]()
    least = plot_step.floors(config, {"ms": 200.0, "tokens/s": 20480.0}, tflops=1000.0, tbps=1.0)
    head = 6 * config.vocab_size * config.hidden_size * 4096
    experts = 6 * 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok * 4096 * 8
    assert least["head products"] == pytest.approx(head / 1e12)
    assert least["routed experts"] == pytest.approx(experts / 1e12)
    plot_step.draw(tmp_path / "step.png", {"mHC": 2.0, "all else": 1.0}, least, "test")
    assert (tmp_path / "step.png").stat().st_size > 1000
