"""Launching compiled kernels from any thread."""

import ctypes
import struct
import threading

import pytest
import torch

from megatron_dsv41.ops import cuda_kernels

SOURCE = """
template <int BY> __global__ void add(int* x, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += BY;
}
"""

EARLY = """
template <int SPIN> __global__ void add_late(int* x, int count) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (long long end = clock64() + SPIN; clock64() < end;) {}
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += 3;
}
template <int BY> __global__ void scale(int* x, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (i < count) x[i] *= BY;
}
"""


class Driver:
    """Answers like the CUDA driver of one device, and keeps what it was asked for."""

    def __init__(self, context: int):
        self.context, self.calls = context, []

    def cuCtxGetCurrent(self, place):
        place._obj.value = self.context
        return 0

    def cuDevicePrimaryCtxRetain(self, place, device: int):
        self.calls.append(("retain", device))
        place._obj.value = 7
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p):
        self.calls.append(("set", context.value))
        return 0

    def cuLaunchKernelEx(self, config, function, places, extra):
        """Reads as C would, by cuda.h's offsets: 7 words, stream, attributes (id; value 8 bytes on), their number."""
        raw = ctypes.string_at(config, 56)
        attribute = ctypes.string_at(int.from_bytes(raw[40:48], "little"), 72)
        words = struct.unpack("7I", raw[:28]) + struct.unpack("QQI", raw[32:52])[::2]
        self.calls.append((words, struct.unpack("i4xi", attribute[:12]), function))
        self.calls.append((ctypes.c_int.from_address(places[0]).value, ctypes.c_double.from_address(places[1]).value))
        return 0


def test_only_a_thread_without_a_context_gets_one(monkeypatch):
    for context, calls in ((5, []), (0, [("retain", 1), ("set", 7)])):
        driver = Driver(context)
        monkeypatch.setattr(cuda_kernels, "_driver", lambda driver=driver: driver)
        cuda_kernels._enter_context(1)
        assert driver.calls == calls


def test_an_early_launch_tells_the_driver(monkeypatch):
    driver = Driver(5)
    monkeypatch.setattr(cuda_kernels, "_driver", lambda: driver)
    cuda_kernels._launch_early(ctypes.c_void_p(9), 6, 128, 4096, 77, (3, 0.5))
    (words, attribute, function), values = driver.calls
    assert words == (6, 1, 1, 128, 1, 1, 4096, 77, 1)
    assert attribute == (6, 1)  # may follow programmatically
    assert function.value == 9
    assert values == (3, 0.5)


def test_driver_errors_are_raised():
    with pytest.raises(RuntimeError, match="CUDA driver error 201"):
        cuda_kernels._check(201)


@pytest.mark.gpu
def test_a_new_thread_compiles_and_launches(tmp_path):
    (tmp_path / "add.cu").write_text(SOURCE)
    x = torch.arange(100, dtype=torch.int32, device="cuda")
    thread = threading.Thread(target=cuda_kernels.launch, args=(tmp_path / "add.cu", "add<3>", 1, 128, x, len(x)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert x.tolist() == list(range(3, 103))


@pytest.mark.gpu
def test_an_early_kernel_reads_what_the_last_one_wrote(tmp_path):
    (tmp_path / "early.cu").write_text(EARLY)
    file, x = tmp_path / "early.cu", torch.zeros(1 << 20, dtype=torch.int32, device="cuda")

    def twice():
        for _ in range(2):
            cuda_kernels.launch(file, "add_late<20000>", 1 << 11, 512, x, len(x))
            cuda_kernels.launch(file, "scale<2>", 1 << 11, 512, x, len(x), early=True)

    twice()  # 0 -> 3 -> 6 -> 9 -> 18
    torch.cuda.synchronize()
    assert torch.equal(x, torch.full_like(x, 18))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice()
    x.zero_()
    for _ in range(2):
        graph.replay()
    assert torch.equal(x, torch.full_like(x, ((18 + 3) * 2 + 3) * 2))
