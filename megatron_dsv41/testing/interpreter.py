"""Triton kernels on the CPU: where tests put their tensors, and what Triton's interpreter (3.6 to 3.8) gets wrong.

With TRITON_INTERPRET=1 kernels run in NumPy, which knows no bfloat16: the interpreter holds its bits as integers,
multiplies those bits in `tl.dot`, cuts off where a GPU rounds, and loses subnormals and NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_dsv41.ops.triton_checks import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def mend() -> None:
    """Make the interpreter convert floats as a GPU does, and multiply bfloat16 by value. Once per process."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    floats = {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    stock_convert, stock_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """`data` as bits of `target`, rounded to nearest even; what E4M3 cannot hold becomes its largest number."""
        if source not in floats or target not in floats:
            return stock_convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}")
        values = torch.from_numpy(bits.copy()).view(floats[source])
        if target == tl.float8e4nv:
            values = values.float().clamp(-448.0, 448.0)
        found = values.to(floats[target]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
        return found.numpy().view(f"u{target.primitive_bitwidth // 8}")

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        def exact(x: Any) -> Any:
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle(convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

        return stock_dot(self, exact(a), exact(b), d, input_precision, max_num_imprecise_acc)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
