"""The CUDA kernels of provider "hopper" of mhc.site, run on the CPU from their source, against the definition."""

import functools
import shutil

import pytest
import torch

from megatron_dsv41.ops.mhc import hopper_site, ref
from megatron_dsv41.testing import mhc
from megatron_dsv41.testing.host_cuda import SCHEDULES, HostKernels
from megatron_dsv41.testing.mhc import assert_errors_are_the_definitions, call, hostile, pick, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
operands = functools.partial(mhc.operands, dtype=torch.bfloat16, device="cpu")
DIMS = (64, 192, 320)  # of one block; with chunks of which the last is half as wide
PARAMETERS = [f"<{update}, {dim}>" for update in ("true", "false") for dim in DIMS]
INSTANCES = {
    hopper_site.FORWARD: [f"site_forward{parameters}" for parameters in PARAMETERS],
    hopper_site.BACKWARD: [f"site_backward{parameters}" for parameters in PARAMETERS],
    hopper_site.FN_GRADIENT: ["fn_gradient<4>"],
    hopper_site.COEFFICIENTS: ["predict_forward<8>", "predict_backward<16>", "sum_gradients<384>"],
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(INSTANCES, tmp_path_factory.mktemp("host"))


@pytest.fixture
def site(kernels, monkeypatch):
    """hopper_site on CPU tensors. The checks that it leaves out are those of the device."""
    monkeypatch.setattr(hopper_site, "launch", kernels.launch)
    monkeypatch.setattr(hopper_site, "_check", lambda *operands: None)
    return use(monkeypatch, multiprocessors=132)


def use(monkeypatch, multiprocessors):
    monkeypatch.setattr(hopper_site, "_multiprocessors", lambda device: multiprocessors)
    return hopper_site


@pytest.mark.parametrize("op", ["site", "first site"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (33, 192), (130, 320)])
def test_errors_are_the_definitions_in_any_order_of_threads(kernels, site, tokens, dim, op):
    inputs, found = pick(op, operands(tokens, dim)), []
    for schedule in SCHEDULES:
        kernels.schedule = schedule
        found.append(run(call(site, op), inputs))
    assert_errors_are_the_definitions(op, inputs, found[0])
    for values, gradients in found[1:]:
        for got, other in zip(found[0][0] + found[0][1], values + gradients, strict=True):
            assert torch.equal(got, other)


@pytest.mark.parametrize("multiprocessors", [3, 7])
def test_blocks_that_go_from_tile_to_tile(kernels, site, monkeypatch, multiprocessors):
    inputs = operands(290, 320)
    want, got = run(call(site, "site"), inputs), run(call(use(monkeypatch, multiprocessors), "site"), inputs)
    for wide, narrow in zip(want[0] + want[1], got[0] + got[1], strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e18])
def test_hostile_streams(site, size):
    inputs = hostile(operands(33, 192), size)
    for want, got in zip(call(ref, "site")(*inputs), call(site, "site")(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-6 * max(size, 1.0))


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("copy_wait<1>();  // for all", "copy_wait<3>();  // for all"),
        ("rows.at(g % 4, g / 4 * 8 + 4 * b + q)", "rows.at(g % 4, g / 4 * 8 + q)"),
        ("SPANS = 2;", "SPANS = 3;"),
    ],
    ids=["a wait", "a place", "a span"],
)
def test_a_fault_is_seen(monkeypatch, tmp_path, sound, broken):
    """A wait for too little, places that are not the lane's, and shared memory that was not asked for."""
    source = hopper_site.FORWARD.read_text()
    assert sound in source
    for header in hopper_site.FORWARD.parent.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    faulty = tmp_path / "faulty.cu"
    faulty.write_text(source.replace(sound, broken))
    instances = {faulty: ["site_forward<true, 192>"], hopper_site.COEFFICIENTS: ["predict_forward<8>"]}
    kernels = HostKernels(instances, tmp_path)
    monkeypatch.setattr(hopper_site, "FORWARD", faulty)
    monkeypatch.setattr(hopper_site, "launch", kernels.launch)
    monkeypatch.setattr(hopper_site, "_check", lambda *operands: None)
    inputs = operands(33, 192)
    want = call(ref, "site")(*inputs)
    try:
        got = call(use(monkeypatch, 3), "site")(*inputs)
    except RuntimeError as error:
        assert "shared memory" in str(error)
        return
    assert not torch.allclose(got[0].float(), want[0].float(), atol=0.1)
