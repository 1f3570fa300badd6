"""Sinkhorn-balanced momentum for tables: rows and columns of the update get equal norms (SPEC 17)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _alone(x: Tensor) -> Tensor:
    return x


def sinkhorn_balance(
    update: Tensor,
    total_rows: int | None = None,
    steps: int = 11,
    threshold: float = 1e-3,
    eps: float = 1e-20,
    reduce: Callable[[Tensor], Tensor] = _alone,
) -> Tensor:
    """sqrt(cols) U of an update [rows, cols]: U has nearly unit rows and columns of equal norm.

    Rows whose norm is at most `threshold` times the mean over all rows become zero. Then steps 1, 3, .. divide each row
    by (its norm + eps), steps 2, 4, .. each column. Only scale vectors change from step to step, not the matrix.

    Rows may be sharded: `update` then holds some of the `total_rows` rows, and `reduce` adds a tensor up over the
    shards (column norms and the mean row norm need it; one small reduction per even step).
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    update = update.to(wide)
    rows, cols = update.shape
    norm_R = _row_norms(update)
    mean = reduce(norm_R.sum()) / (total_rows or rows)
    norm_R = torch.where(norm_R > threshold * mean, norm_R, 0.0)
    if steps < 1:
        return update * (norm_R > 0)[:, None] * cols**0.5
    # Step 1 for real: unit rows, so that squares below neither overflow nor vanish.
    unit_RC = update * _inverse(norm_R, eps)[:, None]
    squares_RC = unit_RC.square()
    row_R, col_C = torch.ones_like(norm_R), unit_RC.new_ones(cols)
    for step in range(2, steps + 1):
        if step % 2:
            row_R = row_R * _inverse(row_R * (squares_RC @ col_C.square()).sqrt(), eps)
        else:
            col_C = col_C * _inverse(col_C * reduce(row_R.square() @ squares_RC).sqrt(), eps)
    return unit_RC * (row_R[:, None] * col_C) * cols**0.5


def _row_norms(matrix_RC: Tensor) -> Tensor:
    """L2 norms of rows that may be too small to be squared."""
    largest_R = matrix_RC.abs().amax(1)
    safe_R = torch.where(largest_R > 0, largest_R, 1.0)
    return largest_R * torch.linalg.vector_norm(matrix_RC / safe_R[:, None], dim=1)


def _inverse(norm: Tensor, eps: float) -> Tensor:
    """1 / (norm + eps), and 0 for an empty row or column, whose scale would grow without bound."""
    return torch.where(norm > 0, 1.0 / (norm + eps), 0.0)


@torch.no_grad()
def sinkhorn_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    balance: Callable[[Tensor], Tensor],
    *,
    lr: float,
    beta: float = 0.95,
    rms: float = 0.18,
) -> None:
    """One step in place: M <- beta M + (1 - beta) G; W <- W - lr rms balance(beta M + (1 - beta) G).

    The average form, unlike Muon's sum. `momentum` may be stored in bf16; the step then uses the unrounded one.
    """
    moved = momentum.to(grad.dtype) * beta + grad * (1 - beta)
    momentum.copy_(moved)
    weight.sub_(balance(moved * beta + grad * (1 - beta)).to(weight.dtype), alpha=lr * rms)
