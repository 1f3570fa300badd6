"""The kernels of quantization compile for SM90 without a GPU or spills, with loads and stores of 16 bytes."""

import importlib
import importlib.util

import pytest

from megatron_dsv41.testing.sm90 import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
TYPES = {"x": "bf16", "out": "bf16", "q": "fp8e4nv", "scale": "fp32", "factor": "fp32", "group": "i64"}
TYPES |= {"columns": "i32:16", "rows": "i32:16"}
KERNELS = {
    "factored": ("scaled", "_rows", dict(BLOCK=8192, FACTORED=True), 8),
    "rows": ("scaled", "_rows", dict(BLOCK=4096, FACTORED=False), 8),
    "transposes": ("scaled", "_transposes", dict(BLOCK_R=128, BLOCK_C=64), 4),
    "fp8": ("fake", "_fake", dict(FORMAT="fp8", BLOCK=32, ROWS=64), 4),
    "mxfp4": ("fake", "_fake", dict(FORMAT="mxfp4", BLOCK=32, ROWS=64), 4),
    "fp4": ("fake", "_fake", dict(FORMAT="fp4", BLOCK=16, ROWS=128), 4),
}


@pytest.mark.parametrize(("module", "name", "constants", "warps"), KERNELS.values(), ids=KERNELS)
def test_compiles(module, name, constants, warps, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(f"megatron_dsv41.ops.quant.triton_{module}"), name)
    compiled = compile_kernel(kernel, constants, TYPES, tmp_path, num_warps=warps)
    assert "ld.global.v4" in compiled.ptx and "st.global.v4" in compiled.ptx
    assert ("cvt.rn.satfinite.e4m3x2" in compiled.ptx) == (module == "scaled")
    assert compiled.shared <= 49152 and not compiled.stack
