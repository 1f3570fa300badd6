"""The kernels compile for SM90 without a GPU, at the released shapes, without spills in earnest."""

import importlib
import importlib.util

import pytest

from megatron_dsv41.testing.sm90 import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS, MERGE, HASH, GATE, UPDATE = (
    "engram.triton_rows",
    "engram.triton_merge",
    "engram.triton_hash",
    "engram.triton_gate_kernels",
    "sinkhorn.triton_update_kernels",
)
DTYPES = {
    "i64": ["ids", "map", "position", "constants", "places", "order", "begins", "long"],
    "i1": ["alive", "image"],
    "fp32": ["sums", "norms", "limit", "scales", "columns", "partial", "scale", "beta", "rest", "eps", "lr"],
    "bf16": ["values", "momentum", "weight"],
    "i32": ["slots"],
}
TYPES = {name: dtype for dtype, names in DTYPES.items() for name in names}
STREAMS = ["x", "key", "value", "q", "k", "out", "grad", "grad_x", "grad_key", "grad_value", "grad_q", "grad_k"]
GATED = dict.fromkeys(STREAMS, "bf16") | {"open": "i8", "stats": "fp32", "factors": "fp32", "grad_gain": "fp32"}
ROW, SUMS = dict(DIM=256, BLOCK_D=256), dict(D=256, INTO=True)
WIDE = dict(D=5120, BLOCK=1024, BLOCKS=5, FLOOR=1e-6, SCALE=5120**-0.5)
TABLE = dict(COLS=256, BLOCK_C=256, BLOCK_R=8, SPARSE=True)
HEAD = dict(COLS=5120, BLOCK_C=8192, BLOCK_R=1, SPARSE=False)
KERNELS = [
    (HASH, "hash_kernel", dict(BACK=4, HEADS=8, BLOCK_H=8, BLOCK_T=64), {"rows": "i64"}, 4),
    (ROWS, "read_float8", ROW | dict(BLOCK_E=8, SCALED=32), {"rows": "u8", "out": "bf16"}, 4),
    (ROWS, "read_plain", ROW | dict(BLOCK_E=8), {"rows": "bf16", "out": "bf16"}, 4),
    (ROWS, "encode_float8", ROW | dict(BLOCK_R=8, SCALED=32, LARGEST=448.0, INVERSE=1 / 448), {"out": "u8"}, 4),
    (MERGE, "merge_short", SUMS | dict(BLOCK_D=256, BLOCK_M=8, LONG=32), {"rows": "i64"}, 4),
    (MERGE, "merge_long", SUMS | dict(BLOCK_D=128, BLOCK_L=32), {"rows": "i64"}, 4),
    (GATE, "gate_forward", WIDE | dict(N=4, RMS_EPS=1e-20), GATED, 4),
    (GATE, "gate_backward_rows", WIDE, GATED, 4),
    (GATE, "gate_backward_streams", dict(D=5120, BLOCK=1024, BLOCK_T=2), GATED, 2),
    (GATE, "sum_gain_gradients", dict(SIZE=4 * 5120, BLOCK=128), GATED, 4),
    (UPDATE, "row_norms", TABLE, {"grad": "fp32"}, 4),
    (UPDATE, "column_squares", TABLE | dict(BALANCE=True), {"grad": "fp32"}, 4),
    (UPDATE, "apply_update", TABLE | dict(BALANCE=True, STEPS=True), {"grad": "fp32"}, 4),
    (UPDATE, "column_squares", HEAD | dict(BALANCE=True), {"grad": "fp32"}, 8),
    (UPDATE, "apply_update", HEAD | dict(BALANCE=True, STEPS=True), {"grad": "fp32"}, 8),
]


@pytest.mark.parametrize(
    ("module", "name", "constants", "types", "warps"), KERNELS, ids=[f"{k[1]}-{len(k[2])}-{k[4]}" for k in KERNELS]
)
def test_compiles(module, name, constants, types, warps, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(f"megatron_dsv41.ops.{module}"), name)
    compiled = compile_kernel(kernel, constants, TYPES | types, tmp_path, num_warps=warps)
    assert not compiled.stack
