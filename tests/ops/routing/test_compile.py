"""SwiGLU and the rows to experts and back compile for SM90 without a GPU or spills, with loads of 16 bytes."""

import importlib
import importlib.util

import pytest

from megatron_dsv41.testing.sm90 import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
BF16 = ["gate", "up", "out", "grad", "grad_gate", "grad_up", "x", "rows"]
TYPES = dict.fromkeys(BF16, "bf16") | {"weight": "fp32", "grad_weight": "fp32", "place": "i64", "limit": "fp32"}
GATED, ROUTED = dict(WEIGHTED=True, BLOCK=1024), dict(K=6, BLOCK=1024)
KERNELS = [
    ("swiglu", "_forward", GATED | dict(size=2304, gate_stride=4608, up_stride=4608)),
    ("swiglu", "_backward", GATED | dict(size=2304, gate_stride=4608, up_stride=4608, grad_stride=4608)),
    ("rows", "spread_forward", ROUTED | dict(dim=5120)),
    ("rows", "sum_forward", ROUTED | dict(dim=5120)),
]


@pytest.mark.parametrize(("module", "name", "constants"), KERNELS, ids=[k[1] for k in KERNELS])
def test_compiles(module, name, constants, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(f"megatron_dsv41.ops.routing.triton_{module}"), name)
    compiled = compile_kernel(kernel, constants, TYPES, tmp_path, num_warps=4)
    assert "ld.global.v4" in compiled.ptx and not compiled.stack
