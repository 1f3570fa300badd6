"""The kernels of scaled operands compile for SM90 without a GPU, with 16-byte loads and stores of FP8."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
TYPES = {
    "x_ptr": "*bf16",
    "q_ptr": "*fp8e4nv",
    "scale_ptr": "*fp32",
    "factor_ptr": "*fp32",
    "group_ptr": "*i64",
    "columns": "i32",
    "rows": "i32",
}
KERNELS = [
    ("_rows", dict(BLOCK=8192, FACTORED=True), 8),
    ("_rows", dict(BLOCK=4096, FACTORED=False), 8),
    ("_transposes", dict(BLOCK_R=128, BLOCK_C=64), 4),
]


@pytest.mark.parametrize(("name", "constants", "warps"), KERNELS, ids=["factored", "rows", "transposes"])
def test_compiles(name, constants, warps, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_dsv41.ops.quant import triton_scaled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_scaled, name)
    signature = {argument: TYPES.get(argument, "constexpr") for argument in kernel.arg_names}
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    sixteen = {(kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in TYPES if key in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=places, attrs=sixteen),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    ptx = compiled.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2" in ptx and "ld.global.v4" in ptx and "st.global.v4" in ptx
    assert compiled.metadata.shared <= 49152
