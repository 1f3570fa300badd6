"""Triton kernels compiled for SM90 where there is no GPU, and what the result needs of a multiprocessor."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    """PTX, shared memory in bytes, and registers and stack bytes of a thread (None where Triton brings no reader)."""

    ptx: str
    shared: int
    registers: int | None
    stack: int | None


def compile_kernel(
    kernel: Any, constants: Mapping[str, Any], pointers: Mapping[str, str], num_warps: int, folder: Path
) -> Compiled:
    """`kernel` for SM90: `pointers` "x" -> "bf16" are its arguments x_ptr, 16-byte aligned; other scalars are int32.

    `folder` takes the binary. Set TRITON_CACHE_DIR to a fresh one to compile for certain.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        name = argument.removesuffix("_ptr")
        if argument in constants:
            signature[argument] = "constexpr"
        elif name == argument:
            signature[argument] = "i32"
        else:
            signature[argument] = f"*{pointers[name]}"
            aligned[(place,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps},
    )
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    used: dict[str, str] = {}
    if tool.exists():
        report = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
        used = dict(re.findall(r"([A-Z]+):(\d+)", report.stdout))
    registers, stack = (int(used[key]) if key in used else None for key in ("REG", "STACK"))
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, registers, stack)
