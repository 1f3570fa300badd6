"""Small kernels on the host: what they compute, and what is said of those that are wrong."""

import shutil

import pytest
import torch

from megatron_dsv41.testing.host_cuda import SCHEDULES, HostKernels, Schedule

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SOURCE = """
typedef unsigned int u32;
// -- instructions
// -- end of instructions
template <bool MEETS>
__global__ void reverse(const float* from, float* to, int count) {
    extern __shared__ __align__(16) unsigned char memory[];
    float* tile = reinterpret_cast<float*>(memory);
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = at < count ? from[at] : 0.0f;
    if (MEETS) __syncthreads();
    if (at < count) to[at] = tile[blockDim.x - 1 - threadIdx.x];
}
template <int LEFT>
__global__ void copied(const float* from, float* to, int first) {
    extern __shared__ __align__(16) unsigned char memory[];
    const u32 place = shared_address(memory) + threadIdx.x * 16;
    for (int part = 0; part < 2; ++part) {
        copy16(place + part * 512, from + first + part * 128 + threadIdx.x * 4, 16);
        copy_commit();
    }
    copy_wait<LEFT>();
    to[threadIdx.x] = reinterpret_cast<float*>(memory)[128 + threadIdx.x * 4];
}
__global__ void waits(float* to, int count) {
    if ((int)threadIdx.x < count) __syncwarp();
    to[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (float)threadIdx.x, 1);
}
__global__ void leaves(float* to) {
    if (blockIdx.x == 1 && threadIdx.x < 32) return;
    __syncthreads();
}
__global__ void beyond(float* to) {
    extern __shared__ __align__(16) unsigned char memory[];
    memory[threadIdx.x] = 0;
    to[threadIdx.x] = 0;
}
"""
INSTANCES = ["reverse<true>", "reverse<false>", "copied<0>", "copied<1>", "waits", "leaves", "beyond"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(SOURCE, INSTANCES, tmp_path_factory.mktemp("host"))


def outputs(kernels, name, *rest, threads, size, **options):
    """Of a kernel under every schedule."""
    found = []
    for schedule in SCHEDULES:
        kernels.schedule = schedule
        to = torch.full((size,), 7.0)
        kernels.launch("", name, 1, threads, torch.arange(256.0), to, *rest, **options)
        found.append(to)
    return found


def test_a_missing_barrier_shows_in_some_order(kernels):
    want = torch.arange(63.0, -1, -1)
    sound = outputs(kernels, "reverse<true>", 64, threads=64, size=64, shared_bytes=256)
    assert all(torch.equal(found, want) for found in sound)
    racing = outputs(kernels, "reverse<false>", 64, threads=64, size=64, shared_bytes=256)
    assert not all(torch.equal(found, want) for found in racing)


def test_a_wait_too_short_shows_where_copies_land_late(kernels):
    want = torch.arange(128.0, 256.0, 4)
    assert all(torch.equal(x, want) for x in outputs(kernels, "copied<0>", 0, threads=32, size=32, shared_bytes=1024))
    early = outputs(kernels, "copied<1>", 0, threads=32, size=32, shared_bytes=1024)
    assert [bool(found.isnan().all()) for found in early] == [schedule.late_copies for schedule in SCHEDULES]


@pytest.mark.parametrize(
    ("first", "shared_bytes", "message"),
    [
        (4, 1024, "a copy reads outside of every tensor, thread 31 of block 0"),
        (1, 1024, "a copy is not aligned"),
        (0, 1008, "a copy lands beyond shared memory"),
        (0, 1 << 20, "more shared memory than a multiprocessor has"),
    ],
)
def test_copies_that_go_wrong_are_named(kernels, first, shared_bytes, message):
    with pytest.raises(RuntimeError, match=message):
        outputs(kernels, "copied<0>", first, threads=32, size=32, shared_bytes=shared_bytes)


def test_threads_that_wait_for_ever_and_stray_writes(kernels):
    kernels.schedule, to = Schedule(), torch.zeros(32)
    kernels.launch("", "waits", 1, 32, to, 32)
    assert torch.equal(to, (torch.arange(32) ^ 1).float())
    with pytest.raises(
        RuntimeError, match="threads of one warp are at __syncwarp and at a shuffle, thread 31 of block 0"
    ):
        kernels.launch("", "waits", 1, 32, to, 31)
    with pytest.raises(RuntimeError, match="threads wait for one another at __syncthreads in block 1"):
        kernels.launch("", "leaves", 2, 64, to)
    kernels.launch("", "beyond", 1, 32, to, shared_bytes=32)
    with pytest.raises(RuntimeError, match="writes beyond its shared memory"):
        kernels.launch("", "beyond", 1, 32, to, shared_bytes=31)


def test_calls_that_do_not_fit_are_errors(kernels, tmp_path):
    x = torch.zeros(64)
    for arguments, message in (
        ((x, x), "takes 3 arguments, got 2"),
        ((x, x.double(), 64), r"float\* to takes a contiguous tensor of torch.float32, got torch.float64"),
        ((x, torch.zeros(64, 2)[:, 0], 64), "contiguous"),
        ((x, x, 64.0), "int count got 64.0"),
        ((x, 64, x), r"float\* to takes a tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            kernels.launch("", "reverse<true>", 1, 64, *arguments, shared_bytes=256)
    with pytest.raises(ValueError, match="no kernel other"):
        HostKernels(SOURCE, ["other<1>"], tmp_path)
    with pytest.raises(ValueError, match="does not mark its instructions"):
        HostKernels("__global__ void f(int n) {}", ["f"], tmp_path)
    with pytest.raises(RuntimeError, match="does not take the kernels"):
        HostKernels(SOURCE + "what", ["waits"], tmp_path)
