"""The kernels compile for SM90 without a GPU, at the released shapes, without spills in earnest."""

import importlib
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
ROWS, MERGE, HASH, UPDATE = (
    "engram.triton_rows",
    "engram.triton_merge",
    "engram.triton_hash",
    "sinkhorn.triton_update_kernels",
)
POINTERS = {
    "*i64": {"ids", "map", "position", "constants", "places", "order", "begins", "long"},
    "*i1": {"alive", "image"},
    "*fp32": {"sums", "norms", "limit", "scales", "columns", "partial"},
    "*bf16": {"values", "momentum", "weight"},
    "*i32": {"slots"},
}
TYPES = {f"{name}_ptr": dtype for dtype, names in POINTERS.items() for name in names}
FLOATS = {"scale", "beta", "rest", "eps", "lr"}
ROW, SUMS = dict(DIM=256, BLOCK_D=256), dict(D=256, INTO=True)
TABLE = dict(COLS=256, BLOCK_C=256, BLOCK_R=8, SPARSE=True)
HEAD = dict(COLS=5120, BLOCK_C=8192, BLOCK_R=1, SPARSE=False)
KERNELS = [
    (HASH, "hash_kernel", dict(BACK=4, HEADS=8, BLOCK_H=8, BLOCK_T=64), {"rows": "*i64"}, 4),
    (ROWS, "read_float8", ROW | dict(BLOCK_E=8, SCALED=32), {"rows": "*u8", "out": "*bf16"}, 4),
    (ROWS, "read_plain", ROW | dict(BLOCK_E=8), {"rows": "*bf16", "out": "*bf16"}, 4),
    (ROWS, "encode_float8", ROW | dict(BLOCK_R=8, SCALED=32, LARGEST=448.0, INVERSE=1 / 448), {"out": "*u8"}, 4),
    (MERGE, "merge_short", SUMS | dict(BLOCK_D=256, BLOCK_M=8, LONG=32), {"rows": "*i64"}, 4),
    (MERGE, "merge_long", SUMS | dict(BLOCK_D=128, BLOCK_L=32), {"rows": "*i64"}, 4),
    (UPDATE, "row_norms", TABLE, {"grad": "*fp32"}, 4),
    (UPDATE, "column_squares", TABLE | dict(BALANCE=True), {"grad": "*fp32"}, 4),
    (UPDATE, "apply_update", TABLE | dict(BALANCE=True, STEPS=True), {"grad": "*fp32"}, 4),
    (UPDATE, "column_squares", HEAD | dict(BALANCE=True), {"grad": "*fp32"}, 8),
    (UPDATE, "apply_update", HEAD | dict(BALANCE=True, STEPS=True), {"grad": "*fp32"}, 8),
]


@pytest.mark.parametrize(
    ("module", "name", "constants", "types", "warps"), KERNELS, ids=[f"{k[1]}-{len(k[2])}-{k[4]}" for k in KERNELS]
)
def test_compiles(module, name, constants, types, warps, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(importlib.import_module(f"megatron_dsv41.ops.{module}"), name)
    known = TYPES | {f"{key}_ptr": value for key, value in types.items()}
    signature, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        scalar = "fp32" if argument in FLOATS else "i32"
        signature[argument] = "constexpr" if argument in constants else known.get(argument, scalar)
        if argument in known:
            aligned[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if tool.exists():
        report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
        found = re.search(r"STACK:(\d+)", report)
        assert found and int(found.group(1)) <= 64
        print(name, re.findall(r"REG:\d+ STACK:\d+ SHARED:\d+", report))
