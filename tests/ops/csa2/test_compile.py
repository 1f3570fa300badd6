"""The kernels compile for SM90 without a GPU, in the configurations of the released model."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from megatron_dsv41.ops.csa2 import ref

FOLDER = Path(ref.__file__).parent
POINTERS = {
    "bf16": ["q", "window", "compressed", "out", "grad_out", "grad_q", "p", "ds", "weight", "keys"],
    "fp32": ["sink", "lse", "teacher", "delta", "target", "grad_window"],
    "i32": ["topk"],
    "i64": ["start", "first", "visible"],
    "i16": ["score"],
    "u8": ["wanted"],
}
TYPES = {f"{name}_ptr": f"*{dtype}" for dtype, names in POINTERS.items() for name in names}
SHAPE = dict(WINDOW=128, MAX_TOPK=512, D=512, BLOCK_H=64)
BAND = dict(WINDOW=128, D=512, BLOCK_H=64, BLOCK_J=128, CHUNK_D=128)
SCORE = dict(HEADS=32, D=128, BLOCK_T=64, BLOCK_C=128, BLOCK_SIZE=0, PACKED=True)
TRITON = [
    ("attend", "attend_forward", SHAPE | dict(BLOCK_S=64), 8, 2),
    ("attend", "attend_backward_query", SHAPE | dict(BLOCK_S=64, CHUNK_D=128), 8, 1),
    ("attend", "attend_backward_entries", SHAPE | dict(BLOCK_S=64, CHUNK_D=128, ATOMIC=True), 4, 3),
    ("attend", "attend_backward_window", BAND, 8, 3),
    ("select", "score_entries", SCORE, 4, 2),
]
CUDA = [("hopper_attend.cu", "attend_backward"), ("largest.cu", "largest")]  # each compiles its whole file


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("family", "name", "constants", "warps", "stages"), TRITON, ids=[row[1] for row in TRITON])
def test_triton_kernel_compiles(family, name, constants, warps, stages, monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = importlib.import_module(f"megatron_dsv41.ops.csa2.triton_{family}_kernels")
    kernel = getattr(module, name)
    signature, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        is_scale = argument.startswith("scale")
        signature[argument] = TYPES.get(argument, "fp32" if is_scale else "i32")
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in TYPES:
            aligned[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=places, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    assert compiled.metadata.shared <= 232448  # bytes that a CTA of SM90 may have
    assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch, for its NVRTC")
@pytest.mark.parametrize(("file", "name"), CUDA, ids=[name for _, name in CUDA])
def test_cuda_kernel_compiles(file, name, monkeypatch):
    from torch.cuda._utils import _nvrtc_compile

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "/")
    binary, _ = _nvrtc_compile((FOLDER / file).read_text(), name, "90a")
    assert len(binary) > 1000
