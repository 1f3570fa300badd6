"""Sinkhorn-balanced momentum for tables: rows and columns of the update get equal norms (SPEC 17)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dsv41.ops.row_blocks import gradient_rows, row_blocks

ReadRows = Callable[[slice], Tensor]


def _alone(x: Tensor) -> Tensor:
    return x


class Balance:
    """sqrt(cols) U of an update [rows, cols]: U has nearly unit rows and columns of equal norm.

    Rows whose norm is at most `threshold` times the mean over all rows become zero. Then steps 1, 3, .. divide each row
    by (its norm + eps), steps 2, 4, .. each column. Only scale vectors change from step to step: the update is read
    through `read` (rows -> [n, cols] float32 or wider), row blocks after row blocks, once for the norms and once for
    every two steps, and is held nowhere.

    Rows may be sharded: `read` then gives some of the `total_rows` rows, and `reduce` adds a tensor up over the shards
    (column norms and the mean row norm need it; one small reduction per even step).
    """

    def __init__(
        self,
        read: ReadRows,
        shape: tuple[int, int],
        like: Tensor,
        *,
        total_rows: int | None = None,
        steps: int = 11,
        threshold: float = 1e-3,
        eps: float = 1e-20,
        reduce: Callable[[Tensor], Tensor] = _alone,
        block_elements: int | None = None,
    ):
        rows, self.cols = shape
        self.read, self.eps, self.blocks = read, eps, list(row_blocks(rows, self.cols, block_elements))
        norm_R = like.new_zeros(rows)
        for block in self.blocks:
            norm_R[block] = _row_norms(read(block))
        mean = reduce(norm_R.sum()) / (total_rows or rows)
        norm_R = torch.where(norm_R > threshold * mean, norm_R, 0.0)
        # Step 1: unit rows, so that squares below neither overflow nor vanish.
        self.unit_R = _inverse(norm_R, eps) if steps else (norm_R > 0).to(norm_R.dtype)
        self.row_R, self.col_C = torch.ones_like(norm_R), norm_R.new_ones(self.cols)
        for step in range(2, steps + 1, 2):
            squares_C = torch.zeros_like(self.col_C)
            for block in self.blocks:
                squares_RC = self._unit_rows(block).square()
                if step > 2:
                    self._balance_rows(block, squares_RC)
                squares_C += self.row_R[block].square() @ squares_RC
            self.col_C = self.col_C * _inverse(self.col_C * reduce(squares_C).sqrt(), eps)
        self.last_is_row = steps > 1 and steps % 2 == 1

    def rows(self, block: slice) -> Tensor:
        """The balanced rows of one of `blocks`. Once per block: the last row step happens here."""
        unit_RC = self._unit_rows(block)
        if self.last_is_row:
            self._balance_rows(block, unit_RC.square())
        return unit_RC * (self.row_R[block][:, None] * self.col_C) * self.cols**0.5

    def _unit_rows(self, block: slice) -> Tensor:
        return self.read(block) * self.unit_R[block][:, None]

    def _balance_rows(self, block: slice, squares_RC: Tensor) -> None:
        row_R = self.row_R[block]
        self.row_R[block] = row_R * _inverse(row_R * (squares_RC @ self.col_C.square()).sqrt(), self.eps)


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
    *,
    lr: float,
    beta: float = 0.95,
    rms: float = 0.18,
    total_rows: int | None = None,
    steps: int = 11,
    threshold: float = 1e-3,
    eps: float = 1e-20,
    reduce: Callable[[Tensor], Tensor] = _alone,
) -> None:
    """One step in place: M <- beta M + (1 - beta) G; W <- W - lr rms balance(beta M + (1 - beta) G).

    The average form, unlike Muon's sum. grad: dense or row-sparse (`row_sparse`), on the device that computes; weight
    and momentum may lie elsewhere. Both may be stored in bf16: the step then uses the unrounded momentum, and rounds
    each once, when it is written. Nothing of the size of `weight` is allocated. The rest is `Balance`'s.
    """
    wide, gradient = torch.promote_types(grad.dtype, torch.float32), gradient_rows(grad)

    def moved(rows: slice) -> tuple[Tensor, Tensor]:
        pulled = gradient(rows).to(wide) * (1 - beta)
        return momentum[rows].to(grad.device, wide) * beta + pulled, pulled

    def update(rows: slice) -> Tensor:
        new, pulled = moved(rows)
        return new * beta + pulled

    found = Balance(
        update,
        (weight.shape[0], weight.shape[1]),
        torch.empty(0, dtype=wide, device=grad.device),
        total_rows=total_rows,
        steps=steps,
        threshold=threshold,
        eps=eps,
        reduce=reduce,
    )
    for rows in found.blocks:
        step = found.rows(rows)  # reads the old momentum
        momentum[rows] = moved(rows)[0].to(momentum.device, momentum.dtype)
        new = weight[rows].to(grad.device, wide).sub_(step, alpha=lr * rms)
        weight[rows] = new.to(weight.device, weight.dtype)
