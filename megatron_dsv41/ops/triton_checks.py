"""What the Triton providers share: where they run, and how they refuse."""

from __future__ import annotations

import os

import torch
from torch import Tensor

# TRITON_INTERPRET=1 runs kernels on CPU tensors, slowly: correctness without a GPU (`make test-triton`).
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DTYPES = (torch.bfloat16, torch.float32)


def check_tensors(op: str, *tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """ValueError where a tensor is not on a CUDA device, or its dtype is none of `dtypes`. None is skipped."""
    for tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cuda and not INTERPRETED:
            raise ValueError(f"{op}: provider 'triton' runs on CUDA tensors, got {tensor.device}; choose 'ref'")
        if tensor.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{op}: provider 'triton' takes {known}, got {tensor.dtype}")
