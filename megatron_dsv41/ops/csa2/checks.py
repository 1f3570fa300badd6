"""What the GPU providers of csa2 take; anything else is an error that says so, never another implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.triton_checks import INTERPRETED


def on_gpu(tensor: Tensor) -> bool:
    """Whether kernels can run on the tensor: CUDA, or Triton's interpreter, which runs kernels on the CPU."""
    return tensor.is_cuda or INTERPRETED


def check_attend(
    provider: str,
    q_THD: Tensor,
    window_kv_JD: Tensor,
    compressed_kv_CD: Tensor | None,
    topk_TK: Tensor | None,
    sink_H: Tensor,
    window_start_T: Tensor,
    dims: tuple[int, ...],
    heads: range,
) -> None:
    """ValueError unless sparse_attend's tensors suit the kernels of `provider`, which take such `dims` and `heads`."""
    want = f"csa2.sparse_attend: provider {provider!r} takes"
    for name, tensor in (("q", q_THD), ("window_kv", window_kv_JD), ("compressed_kv", compressed_kv_CD)):
        if tensor is None:
            continue
        allowed = (torch.bfloat16, torch.float32) if name == "compressed_kv" else (torch.bfloat16,)
        if tensor.dtype not in allowed:
            raise ValueError(f"{want} {name} in bfloat16, got {tensor.dtype}; provider 'ref' takes any float")
        if not on_gpu(tensor):
            raise ValueError(f"{want} CUDA tensors, got {name} on {tensor.device}; provider 'ref' runs anywhere")
    if q_THD.shape[2] not in dims:
        raise ValueError(f"{want} {' or '.join(map(str, dims))} channels, got {q_THD.shape[2]}")
    if q_THD.shape[1] not in heads:
        raise ValueError(f"{want} {heads.start} to {heads.stop - 1} heads, got {q_THD.shape[1]}")
    if (compressed_kv_CD is None) != (topk_TK is None):
        raise ValueError("csa2.sparse_attend: compressed_kv and topk come together or not at all")
    if topk_TK is not None and topk_TK.dtype != torch.int32:
        raise ValueError(f"{want} topk in int32, got {topk_TK.dtype}")
    if sink_H.dtype != torch.float32 or window_start_T.dtype != torch.int64:
        raise ValueError(f"{want} sink in float32 and window_start in int64")


def check_select(q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor) -> None:
    """ValueError unless select's tensors suit the Triton kernels."""
    want = "csa2.select: provider 'triton' takes"
    for name, tensor in (("q", q_TID), ("weights", weights_TI), ("keys", keys_CD)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{want} {name} in bfloat16, got {tensor.dtype}; provider 'ref' takes any float")
        if not on_gpu(tensor):
            raise ValueError(f"{want} CUDA tensors, got {name} on {tensor.device}; provider 'ref' runs anywhere")
    if keys_CD.shape[1] not in (16, 32, 64, 128, 256):
        raise ValueError(f"{want} 16, 32, 64, 128 or 256 channels, got {keys_CD.shape[1]}")
