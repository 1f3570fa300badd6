"""Small kernels on the host: what they compute, and what is said of those that are wrong."""

import shutil

import pytest
import torch

from megatron_dsv41.testing.host_cuda import SCHEDULES, HostKernels, Schedule

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SOURCE = """
#include "hopper_instructions.cuh"
#include "beside.cuh"
template <bool MEETS>
__global__ void reverse(const float* from, float* to, int count) {
    extern __shared__ __align__(16) unsigned char memory[];
    float* tile = reinterpret_cast<float*>(memory);
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = at < count ? from[at] : OUTSIDE;
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
template <int AT, int LEAD>
__global__ void describes(float* to) {
    to[threadIdx.x] = descriptor(AT, LEAD);
}
"""
BESIDE = "constexpr float OUTSIDE = 0.0f;\n"
INSTANCES = ["reverse<true>", "reverse<false>", "copied<0>", "copied<1>", "waits", "leaves", "beyond"]
INSTANCES += ["describes<1024, 16>", "describes<512, 16>", "describes<1024, 8192>"]


def write(folder, source):
    """A file of kernels, and the header beside it that it includes."""
    (folder / "beside.cuh").write_text(BESIDE)
    (folder / "small.cu").write_text(source)
    return folder / "small.cu"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source"), SOURCE)


@pytest.fixture(scope="module")
def kernels(file, tmp_path_factory):
    return HostKernels({file: INSTANCES}, tmp_path_factory.mktemp("host"))


def outputs(kernels, file, name, *rest, threads, size, **options):
    """Of a kernel under every schedule."""
    found = []
    for schedule in SCHEDULES:
        kernels.schedule = schedule
        to = torch.full((size,), 7.0)
        kernels.launch(file, name, 1, threads, torch.arange(256.0), to, *rest, **options)
        found.append(to)
    return found


def test_a_missing_barrier_shows_in_some_order(kernels, file):
    want = torch.arange(63.0, -1, -1)
    sound = outputs(kernels, file, "reverse<true>", 64, threads=64, size=64, shared_bytes=256)
    assert all(torch.equal(found, want) for found in sound)
    racing = outputs(kernels, file, "reverse<false>", 64, threads=64, size=64, shared_bytes=256)
    assert not all(torch.equal(found, want) for found in racing)


def test_a_wait_too_short_shows_where_copies_land_late(kernels, file):
    want = torch.arange(128.0, 256.0, 4)
    assert all(
        torch.equal(x, want) for x in outputs(kernels, file, "copied<0>", 0, threads=32, size=32, shared_bytes=1024)
    )
    early = outputs(kernels, file, "copied<1>", 0, threads=32, size=32, shared_bytes=1024)
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
def test_copies_that_go_wrong_are_named(kernels, file, first, shared_bytes, message):
    with pytest.raises(RuntimeError, match=message):
        outputs(kernels, file, "copied<0>", first, threads=32, size=32, shared_bytes=shared_bytes)


def test_threads_that_wait_for_ever_and_stray_writes(kernels, file):
    kernels.schedule, to = Schedule(), torch.zeros(32)
    kernels.launch(file, "waits", 1, 32, to, 32)
    assert torch.equal(to, (torch.arange(32) ^ 1).float())
    with pytest.raises(
        RuntimeError, match="threads of one warp are at __syncwarp and at a shuffle, thread 31 of block 0"
    ):
        kernels.launch(file, "waits", 1, 32, to, 31)
    with pytest.raises(RuntimeError, match="threads wait for one another at __syncthreads in block 1"):
        kernels.launch(file, "leaves", 2, 64, to)
    kernels.launch(file, "beyond", 1, 32, to, shared_bytes=32)
    with pytest.raises(RuntimeError, match="writes beyond its shared memory"):
        kernels.launch(file, "beyond", 1, 32, to, shared_bytes=31)


def test_matrices_that_cannot_be_multiplied(kernels, file):
    to = torch.zeros(32)
    kernels.launch(file, "describes<1024, 16>", 1, 32, to)
    assert torch.equal(to, torch.full((32,), 64.0))
    with pytest.raises(RuntimeError, match="a matrix does not start at a swizzle's period"):
        kernels.launch(file, "describes<512, 16>", 1, 32, to)
    with pytest.raises(RuntimeError, match="a matrix is transposed, which is not done here"):
        kernels.launch(file, "describes<1024, 8192>", 1, 32, to)


def test_calls_that_do_not_fit_are_errors(kernels, file, tmp_path):
    x = torch.zeros(64)
    for arguments, message in (
        ((x, x), "takes 3 arguments, got 2"),
        ((x, x.double(), 64), r"float\* to takes a contiguous tensor of torch.float32, got torch.float64"),
        ((x, torch.zeros(64, 2)[:, 0], 64), "contiguous"),
        ((x, x, 64.0), "int count got 64.0"),
        ((x, 64, x), r"float\* to takes a tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            kernels.launch(file, "reverse<true>", 1, 64, *arguments, shared_bytes=256)
    with pytest.raises(ValueError, match="small.cu has no kernel other"):
        HostKernels({file: ["other<1>"]}, tmp_path)
    with pytest.raises(RuntimeError, match="does not take the kernels of small.cu"):
        HostKernels({write(tmp_path, SOURCE + "what"): ["waits"]}, tmp_path)


def test_a_file_has_its_own_kernels(file, tmp_path):
    """Two files with a kernel of one name, which differ in a header of theirs."""
    other, folder = write(tmp_path, SOURCE), tmp_path / "host"
    (tmp_path / "beside.cuh").write_text(BESIDE.replace("0.0f", "5.0f"))
    folder.mkdir()
    both, ends = HostKernels({file: ["reverse<true>"], other: ["reverse<true>"]}, folder), []
    for source in (file, other):
        to = torch.full((32,), 7.0)
        both.launch(source, "reverse<true>", 1, 64, torch.arange(256.0), to, 32, shared_bytes=256)
        ends.append(to)
    assert torch.equal(ends[0], torch.zeros(32)) and torch.equal(ends[1], torch.full((32,), 5.0))
    with pytest.raises(KeyError):
        both.launch(other, "leaves", 1, 32, ends[0])
