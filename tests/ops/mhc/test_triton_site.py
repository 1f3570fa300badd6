"""mHC kernels against the definition in fp64: values, every gradient, odd sizes, hostile values, Sinkhorn's sums."""

import functools
import importlib

import pytest
import torch

from megatron_dsv41.ops.mhc import ref
from megatron_dsv41.testing import mhc
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED
from megatron_dsv41.testing.mhc import CONSTANTS, assert_errors_are_the_definitions, call, hostile, pick, run

operands = functools.partial(mhc.operands, device=DEVICE)
KERNELS = pytest.mark.triton
SIZES = [(1, 64), *([(7, 1280), (37, 256)] if INTERPRETED else [(127, 5120), (4001, 256)])]
PROVIDERS = ["triton"] if INTERPRETED else ["triton", "hopper"]


def load(provider: str):
    """The provider's module. Skips "hopper" where the device is none."""
    if provider == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return importlib.import_module(f"megatron_dsv41.ops.mhc.{provider}_site")


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", ["site", "first site", "collapse", "expand"])
@pytest.mark.parametrize(("tokens", "dim"), SIZES)
def test_bf16_errors_are_the_definitions(op: str, tokens: int, dim: int, provider: str):
    if provider == "hopper" and op in ("collapse", "expand"):
        pytest.skip("left to triton")
    kernels = load(provider)
    inputs = pick(op, operands(tokens, dim, torch.bfloat16))
    assert_errors_are_the_definitions(op, inputs, run(call(kernels, op), inputs))


@KERNELS
@pytest.mark.parametrize("op", ["site", "first site", "collapse", "expand"])
def test_fp32_equals_the_definition(op: str):
    from megatron_dsv41.ops.mhc import triton_site

    inputs = pick(op, operands(127, 128, torch.float32))
    exact, fused = run(call(ref, op), inputs, torch.float64), run(call(triton_site, op), inputs)
    for want, got in zip(exact[0] + exact[1], fused[0] + fused[1], strict=True):
        assert relative_error(got, want) < 1e-5


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_and_columns_sum_to_one_in_bf16(provider: str):
    *_, comb = load(provider).site(*operands(31 if INTERPRETED else 4001, 512, torch.bfloat16), *CONSTANTS)
    want = ref.site(*operands(31 if INTERPRETED else 4001, 512, torch.bfloat16), *CONSTANTS)[-1]
    assert (comb.sum(-2) - 1).abs().max() < 1e-5
    # Rows are as near to one as twenty iterations bring them: as near as the definition's.
    assert (comb.sum(-1) - 1).abs().max() < (want.sum(-1) - 1).abs().max() + 1e-5


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", [0.0, 1e-18, 1e18])
def test_hostile_streams(size: float, provider: str):
    inputs = hostile(operands(33, 256, torch.bfloat16), size)
    plain, fused = call(ref, "site")(*inputs), call(load(provider), "site")(*inputs)
    for want, got in zip(plain, fused, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-6 * max(size, 1.0))


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
def test_same_bits_every_run_and_leading_dims(provider: str):
    kernels, inputs = load(provider), operands(24 if INTERPRETED else 96, 512, torch.bfloat16)
    first, second = run(call(kernels, "site"), inputs), run(call(kernels, "site"), inputs)
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b)
    folded = [t.detach().unflatten(0, (-1, 12)) for t in inputs[:5]]
    for a, b in zip(kernels.site(*folded, *inputs[5:], *CONSTANTS), first[0], strict=True):
        assert torch.equal(a.flatten(0, 1), b)


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("used", ["input and post", "streams", "streams and input"])
def test_site_without_update_and_partial_gradients(used: str, provider: str):
    _, streams, _, _, pre, fn, base, scale = operands(40, 128, torch.bfloat16)
    gradients = []
    for kernels in (ref, load(provider)):
        new, site_input, _, post, _ = kernels.site(None, streams, None, None, pre, fn, base, scale, *CONSTANTS)
        assert torch.equal(new, streams)
        parts = {"input": site_input.float().square().sum(), "post": post.sum(), "streams": new.float().square().sum()}
        loss = sum(parts[name] for name in used.split(" and "))
        leaves = (streams, pre, fn, base)
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert relative_error(got, want) < 1e-2


@KERNELS
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("missing", [0, 1, 2, 3, 4])
def test_outputs_without_a_gradient(missing: int, provider: str):
    inputs = operands(40, 128, torch.bfloat16)
    gradients = []
    for kernels in (ref, load(provider)):
        outputs = call(kernels, "site")(*inputs)
        loss = sum(out.float().square().sum() for i, out in enumerate(outputs) if i != missing)
        gradients.append(torch.autograd.grad(loss, inputs, materialize_grads=True))
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert relative_error(got, want) < 1e-2


def test_refusals():
    pytest.importorskip("triton")
    from megatron_dsv41.ops.mhc import hopper_site, triton_site

    with pytest.raises(ValueError, match="runs on CUDA tensors"):
        triton_site.collapse(torch.zeros(3, 4, 64), torch.zeros(3, 4))
    y, streams = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    mix, base = (torch.zeros(3, 4), torch.zeros(3, 4, 4)), torch.zeros(24)
    with pytest.raises(ValueError, match="on a CUDA device, got torch.bfloat16 on cpu; choose 'triton' or 'ref'"):
        hopper_site.site(y, streams, *mix, torch.zeros(3, 4), torch.zeros(24, 256), base, torch.zeros(3), *CONSTANTS)


@pytest.mark.gpu
def test_hopper_gives_the_same_on_few_multiprocessors(monkeypatch):
    kernels, inputs = load("hopper"), operands(1500, 704, torch.bfloat16)
    many = run(call(kernels, "site"), inputs)
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 7)
    for grid in [kernels.Grid.of_site(inputs[1], blocks) for blocks in (4, 2)] + [kernels.Grid.over(1500, 6, 14)]:
        assert grid.ctas > grid.chunks * grid.shares  # somebody does what the shares leave
    few = run(call(kernels, "site"), inputs)
    fn = len(many[0]) + 5  # its gradient alone is summed over shares
    for i, (a, b) in enumerate(zip(many[0] + many[1], few[0] + few[1], strict=True)):
        assert relative_error(a, b) < 1e-5 if i == fn else torch.equal(a, b), i


@pytest.mark.gpu
def test_hopper_refuses_odd_widths():
    _, streams, _, _, pre, fn, base, scale = operands(3, 40, torch.bfloat16)
    with pytest.raises(ValueError, match=r"multiple of 64, got \[3, 4, 40\]; choose 'ref'"):
        load("hopper").site(None, streams, None, None, pre, fn, base, scale, *CONSTANTS)
