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
    kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str], folder: Path, **options: int
) -> Compiled:
    """`kernel` for SM90: of `types`, "x" -> "bf16" is the dtype behind its 16-byte aligned x_ptr, or of its scalar x.

    "i32:16" is a scalar that is a multiple of 16; scalars not named are int32. `folder` takes the binary. options:
    num_warps, num_stages. Set TRITON_CACHE_DIR to a fresh folder to compile for certain.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        name = argument.removesuffix("_ptr")
        if argument in constants:
            stated = "constexpr"
        else:
            stated = types.get(name, "i32") if name == argument else f"*{types[name]}:16"
        signature[argument], _, multiple = stated.partition(":")
        if multiple:
            aligned[(place,)] = [["tt.divisibility", int(multiple)]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
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
