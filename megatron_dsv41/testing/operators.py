"""Which of torch's operators ran, and what they made: for claims that a tensor does not exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Made(NamedTuple):
    """One result: operator such as "add" or "_to_copy", dtype and shape."""

    operator: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Operators(TorchDispatchMode):
    """While entered, collects in `made` every tensor that an operator returns, but for empty ones and views.

    An autograd backward called meanwhile counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if isinstance(out, torch.Tensor) and not name.startswith("empty") and not func.is_view:
            self.made.append(Made(name, out.dtype, tuple(out.shape)))
        return out
