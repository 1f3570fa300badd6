"""Launching compiled kernels from any thread."""

import ctypes
import threading

import pytest
import torch

from megatron_dsv41.ops.csa2 import cuda_kernels

SOURCE = """
template <int BY> __global__ void add(int* x, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += BY;
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


def test_only_a_thread_without_a_context_gets_one(monkeypatch):
    for context, calls in ((5, []), (0, [("retain", 1), ("set", 7)])):
        driver = Driver(context)
        monkeypatch.setattr(cuda_kernels, "_driver", lambda driver=driver: driver)
        cuda_kernels._enter_context(1)
        assert driver.calls == calls


def test_driver_errors_are_raised():
    with pytest.raises(RuntimeError, match="CUDA driver error 201"):
        cuda_kernels._check(201)


@pytest.mark.gpu
def test_a_new_thread_compiles_and_launches(tmp_path):
    (tmp_path / "add.cu").write_text(SOURCE)
    x = torch.arange(100, dtype=torch.int32, device="cuda")
    thread = threading.Thread(target=cuda_kernels.launch, args=(str(tmp_path / "add.cu"), "add<3>", 1, 128, x, len(x)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert x.tolist() == list(range(3, 103))
