"""The RMSNorm kernels compile for SM90 without a GPU, at the widths of the released model, without spills."""

import importlib.util

import pytest

from megatron_dsv41.testing.sm90 import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
POINTERS = {name: "bf16" for name in ("x", "weight", "out", "grad", "grad_x")} | {"rms": "fp32", "partial": "fp32"}
REGISTERS, SHARED = 65536, 233472  # of a multiprocessor; shared memory in bytes, of which a program takes 1024 beside


@pytest.mark.parametrize("size", [5120, 1280, 512, 128])
def test_backward_fits_a_multiprocessor_twice(size, monkeypatch, tmp_path):
    from megatron_dsv41.ops.norm import triton_rms

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = triton_rms.tiles(size)
    warps = shape.pop("num_warps")
    assert size <= shape["BLOCK"] * shape["BLOCKS"] < 1.25 * size
    kernel = compile_kernel(triton_rms._backward, shape | {"size": size}, POINTERS, tmp_path, num_warps=warps)
    assert not kernel.stack and (kernel.registers is None or 2 * 32 * warps * kernel.registers <= REGISTERS)
    assert 2 * (kernel.shared + 1024) <= SHARED


def test_backward_of_the_widest_rows_fits_in_fp32(monkeypatch, tmp_path):
    from megatron_dsv41.ops.norm import triton_rms

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = triton_rms.tiles(triton_rms.WIDEST)
    warps = shape.pop("num_warps")
    pointers = dict.fromkeys(POINTERS, "fp32")
    kernel = compile_kernel(
        triton_rms._backward, shape | {"size": triton_rms.WIDEST}, pointers, tmp_path, num_warps=warps
    )
    assert kernel.shared + 1024 <= SHARED
