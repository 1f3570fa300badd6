"""Muon: momentum, orthogonalized by Newton-Schulz iteration per logical matrix (SPEC 17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_dsv41.optim.settings import EXACT, FAST, Coefficients

# The published iteration: eight steps that push all singular values near 1 fast, two that bring them to 1.
STEPS: tuple[Coefficients, ...] = (FAST,) * 8 + (EXACT,) * 2


def newton_schulz(
    matrix: Tensor, steps: Sequence[Coefficients] = STEPS, eps: float = 1e-20, dtype: torch.dtype | None = None
) -> Tensor:
    """Approximate U V^T of each matrix U S V^T in [..., rows, cols], in the dtype of the input.

    Per step X <- a X + (b A + c A^2) X with A = X X^T, from X = M / (|M|_F + eps). `dtype` is that of the products
    (None: the input's, at least float32). A zero matrix stays zero.
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    x = matrix.to(wide).flatten(0, -3) if matrix.dim() > 2 else matrix.to(wide)[None]
    # Squares of small momenta would underflow: the largest entry is taken out first.
    largest = x.abs().amax((-2, -1), keepdim=True)
    scaled = x / torch.where(largest > 0, largest, 1.0)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    x = scaled / (norm + eps / torch.where(largest > 0, largest, 1.0))
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(dtype or wide).contiguous()
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape).to(matrix.dtype)


def muon_direction(
    update: Tensor,
    rms: float = 0.18,
    steps: Sequence[Coefficients] = STEPS,
    eps: float = 1e-20,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalized [..., rows, cols], scaled so that a full-rank matrix has root mean square `rms`."""
    rows, cols = update.shape[-2:]
    return newton_schulz(update, steps, eps, dtype) * (max(rows, cols) ** 0.5 * rms)


@torch.no_grad()
def muon_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    direction: Callable[[Tensor], Tensor],
    *,
    lr: float,
    decay: float,
    beta: float = 0.95,
    nesterov: bool = True,
) -> None:
    """One step in place: M <- beta M + G; W <- W (1 - lr decay) - lr direction(beta M + G).

    Sum form: the momentum is not averaged. `momentum` may be stored in bf16; the step then uses the unrounded one.
    """
    moved = momentum.to(grad.dtype) * beta + grad
    momentum.copy_(moved)
    update = moved * beta + grad if nesterov else moved
    weight.mul_(1 - lr * decay).sub_(direction(update).to(weight.dtype), alpha=lr)
