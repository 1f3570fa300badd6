"""The balanced update in Triton: provider "triton" of sinkhorn.update."""

# Kernel launches take options (num_warps, maxnreg) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.sinkhorn import triton_update_kernels as kernels
from megatron_dsv41.ops.triton_checks import check_tensors

WIDEST = 16384


@dataclasses.dataclass(frozen=True)
class Launch:
    """Elements of a block of rows, warps, and programs that share the blocks (at most)."""

    elements: int
    warps: int
    programs: int


# Many more programs than fit at once, so that the last to run do not leave multiprocessors idle for long.
NORMS = SQUARES = APPLY = Launch(elements=2048, warps=4, programs=132 * 64)


@torch.no_grad()
def sinkhorn_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    beta: float = 0.95,
    rms: float = 0.18,
    total_rows: int | None = None,
    steps: int = 11,
    threshold: float = 1e-3,
    eps: float = 1e-20,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Semantics of `sinkhorn.ref.sinkhorn_update` for tensors of one device, up to 16,384 columns.

    Reads momentum and gradient once for the norms, once for every two steps and once for the last; allocates 12 bytes
    per row. Nothing waits for the device.
    """
    rows, cols = weight.shape
    sparse = grad.layout is torch.sparse_coo
    values = (grad.values() if sparse else grad).contiguous()
    check_tensors("sinkhorn.update", weight, values, momentum)
    if cols > WIDEST or not (weight.is_contiguous() and momentum.is_contiguous()):
        raise ValueError(
            f"sinkhorn.update: provider 'triton' takes contiguous tensors of at most {WIDEST} columns, "
            f"got {list(weight.shape)}; choose 'ref'"
        )
    device, constants = weight.device, (beta, 1 - beta)
    slots_R = torch.empty(0, dtype=torch.int32, device=device)
    if sparse:
        ids = grad.indices()[0]
        slots_R = torch.full((rows,), -1, dtype=torch.int32, device=device)
        slots_R[ids] = torch.arange(len(ids), dtype=torch.int32, device=device)
    stored = (momentum, values, slots_R)

    norms_R = torch.empty(rows, dtype=torch.float32, device=device)
    grid, blocks, shape = _share(NORMS, rows, cols)
    if rows:
        kernels.row_norms[grid](*stored, norms_R, rows, blocks, *constants, SPARSE=sparse, **shape)
    limit = (threshold * reduce(norms_R.sum(dtype=torch.float64)) / (total_rows or rows or 1)).float()
    scales_R = torch.ones_like(norms_R)
    columns_C = torch.ones(cols, dtype=torch.float32, device=device)
    found = (norms_R, limit, scales_R, columns_C)

    grid, blocks, shape = _share(SQUARES, rows, cols)
    for step in range(2, steps + 1, 2):
        partial = torch.zeros(grid[0], cols, dtype=torch.float32, device=device)
        if rows:
            kernels.column_squares[grid](
                *stored, *found, partial, rows, blocks, *constants, eps, SPARSE=sparse, BALANCE=step > 2, **shape
            )
        norm_C = columns_C * reduce(partial.sum(0, dtype=torch.float64)).sqrt().float()
        columns_C.mul_(torch.where(norm_C > 0, 1.0 / (norm_C + eps), 0.0))

    grid, blocks, shape = _share(APPLY, rows, cols)
    if rows:
        kernels.apply_update[grid](
            weight, *stored, *found, rows, blocks, *constants, eps, lr * rms * cols**0.5,
            SPARSE=sparse, STEPS=steps > 0, BALANCE=steps > 1 and steps % 2 == 1, **shape,
        )  # fmt: skip


def _share(launch: Launch, rows: int, cols: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, number of row blocks and the constants of a launch."""
    block_cols = triton.next_power_of_2(cols)
    block_rows = max(1, min(64, launch.elements // block_cols))
    blocks = triton.cdiv(rows, block_rows)
    warps = max(launch.warps, min(16, block_rows * block_cols // 1024))
    shape = {"COLS": cols, "BLOCK_C": block_cols, "BLOCK_R": block_rows, "num_warps": warps}
    return (max(1, min(blocks, launch.programs)),), blocks, shape
