"""The CUDA kernels of provider "hopper" of mhc.site, run on the CPU from their source, against the definition."""

import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsv41.ops.mhc import hopper_site, ref
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.host_cuda import SCHEDULES, HostKernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CONSTANTS = (20, 1e-6, 1e-20)
DIMS = (64, 192, 320)  # of one block; with chunks of which the last is half as wide
SOURCE = Path(hopper_site.FILE).read_text()
TEMPLATES = [f"{kernel}<{update}, " for kernel in ("site_forward", "site_backward") for update in ("true", "false")]
INSTANCES = [f"{template}{dim}>" for template in TEMPLATES for dim in DIMS]
INSTANCES += ["predict_forward<8>", "predict_backward<16>", "fn_gradient<4>", "sum_gradients<384>"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(SOURCE, INSTANCES, tmp_path_factory.mktemp("host"))


@pytest.fixture
def site(kernels, monkeypatch):
    """`hopper_site.site` on CPU tensors. The checks that it leaves out are those of the device."""
    monkeypatch.setattr(hopper_site, "launch", kernels.launch)
    monkeypatch.setattr(hopper_site, "_check", lambda *operands: None)
    return use(monkeypatch, multiprocessors=132)


def use(monkeypatch, multiprocessors):
    monkeypatch.setattr(hopper_site, "_multiprocessors", lambda device: multiprocessors)
    return hopper_site.site


def operands(tokens, dim, size=1.0, first=False):
    """y, streams, post, comb, pre, fn, base, scale, as a site gets them; without update where it is a layer's first."""
    g = torch.Generator().manual_seed(tokens)
    streams, y = (torch.randn(*shape, generator=g) * size for shape in ((tokens, 4, dim), (tokens, dim)))
    post, pre = 2 * torch.rand(tokens, 4, generator=g), torch.rand(tokens, 4, generator=g)
    comb = ref.sinkhorn(torch.randn(tokens, 4, 4, generator=g), 20, 1e-6)
    fn = torch.randn(24, 4 * dim, generator=g) / (4 * dim) ** 0.5
    base, scale = torch.randn(24, generator=g), torch.rand(3, generator=g) + 0.5
    update = (None, None, None) if first else (y.bfloat16(), post, comb)
    return [update[0], streams.bfloat16(), *update[1:], pre, fn, base, scale]


def run(function, inputs, dtype=None):
    """Outputs, then gradients, under fixed random output gradients. dtype: computed in it."""
    leaves = [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    outputs = function(*leaves, *CONSTANTS)
    g = torch.Generator().manual_seed(7)
    grads = [torch.randn(out.shape, generator=g).bfloat16().to(out.dtype) for out in outputs]
    taken = [leaf for leaf in leaves if leaf is not None]
    return [*outputs, *torch.autograd.grad(outputs, taken, grads)]


@pytest.mark.parametrize("first", [False, True], ids=["site", "first site"])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (33, 192), (130, 320)])
def test_errors_are_the_definitions_in_any_order_of_threads(kernels, site, tokens, dim, first):
    inputs, found = operands(tokens, dim, first=first), []
    for schedule in SCHEDULES:
        kernels.schedule = schedule
        found.append(run(site, inputs))
    exact, plain = run(ref.site, inputs, torch.float64), run(ref.site, inputs)
    for number, (want, own, got, *others) in enumerate(zip(exact, plain, *found, strict=True)):
        assert relative_error(got, want) <= 1.5 * relative_error(own, want) + 5e-6, number
        assert all(torch.equal(got, other) for other in others), number


@pytest.mark.parametrize("multiprocessors", [3, 7])
def test_blocks_that_go_from_tile_to_tile(kernels, site, monkeypatch, multiprocessors):
    inputs = operands(290, 320)
    want, got = run(site, inputs), run(use(monkeypatch, multiprocessors), inputs)
    for wide, narrow in zip(want, got, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e18])
def test_hostile_streams(site, size):
    inputs = operands(33, 192, size)
    for want, got in zip(ref.site(*inputs, *CONSTANTS), site(*inputs, *CONSTANTS), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-6 * max(size, 1.0))


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("copy_wait<FORWARD_STAGES - 1>();", "copy_wait<FORWARD_STAGES>();"),
        ("rows.at(g, q + 4 * b)", "rows.at(g, q)"),
        ("FORWARD_STAGES = 3, BACKWARD_STAGES = 2", "FORWARD_STAGES = 4, BACKWARD_STAGES = 2"),
    ],
    ids=["a wait", "a place", "a stage"],
)
def test_a_fault_is_seen(monkeypatch, tmp_path, sound, broken):
    """A wait for too little, places that are not the lane's, and shared memory that was not asked for."""
    assert sound in SOURCE
    kernels = HostKernels(SOURCE.replace(sound, broken), ["site_forward<true, 192>", "predict_forward<8>"], tmp_path)
    monkeypatch.setattr(hopper_site, "launch", kernels.launch)
    monkeypatch.setattr(hopper_site, "_check", lambda *operands: None)
    inputs = operands(33, 192)
    want = ref.site(*inputs, *CONSTANTS)
    try:
        got = use(monkeypatch, 3)(*inputs, *CONSTANTS)
    except RuntimeError as error:
        assert "shared memory" in str(error)
        return
    assert not torch.allclose(got[0].float(), want[0].float(), atol=0.1)
