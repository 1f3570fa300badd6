"""The optimizer section of a run. What is published is the default; what is not is a setting with its reason."""

from __future__ import annotations

import dataclasses
from typing import Literal

# Of one Newton-Schulz step. They stand here because run files are read without torch.
Coefficients = tuple[float, float, float]
FAST: Coefficients = (3.4445, -4.7750, 2.0315)  # pushes all singular values near 1
EXACT: Coefficients = (2.0, -1.5, 0.5)  # brings them to 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The update rules (SPEC 17).

    adamw: AdamW for everything. published: Muon for matrices, Sinkhorn-balanced momentum for tables and head, AdamW for
    the rest. muon: the same with AdamW for tables and head. Raises ValueError naming the setting that cannot be.
    """

    name: Literal["adamw", "muon", "published"] = "adamw"
    lr: float = 2.6e-4
    weight_decay: float = 0.1
    clip: float = 1.0  # global gradient norm; 0: no clipping. Unpublished; 1 is what earlier DeepSeek reports state
    frozen: tuple[str, ...] = ()  # patterns of native names (`*` is a wildcard) that no update and no decay touches
    # AdamW
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20
    # Muon
    momentum: float = 0.95
    nesterov: bool = True
    update_rms: float = 0.18  # of a full-rank update, so that AdamW's learning rate is right for it
    ns_steps: int = 8  # coefficients for V4.1 are unpublished: those of the V4 report
    ns_coefficients: tuple[float, ...] = FAST
    ns_final_steps: int = 2
    ns_final_coefficients: tuple[float, ...] = EXACT
    ns_eps: float = 1e-20
    ns_dtype: Literal["float32", "bfloat16"] = "float32"  # of the products; bfloat16 is the fast one on GPUs
    # Sinkhorn-balanced momentum
    sinkhorn_momentum: float = 0.95
    sinkhorn_steps: int = 11
    sinkhorn_threshold: float = 1e-3  # rows below this share of the mean norm are left alone
    sinkhorn_rms: float = 0.18
    sinkhorn_eps: float = 1e-20
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"  # as stored, of Muon and Sinkhorn
    # Which matrices are one: unpublished but for the queries of attention.
    query_heads: bool = True  # wq_b by head: published
    index_query_heads: bool = True  # the indexer's wq_b by head: it is a query weight too
    output_groups: bool = True  # wo_a by output group: each group is a linear of its own, stored together
    engram_projections: bool = True  # key projection of each stream and value projection apart: stored together only
    mhc: Literal["muon", "adamw"] = "muon"  # fn; the V4 report gives AdamW to mHC's static biases and gates alone
    router: Literal["muon", "adamw"] = "muon"  # a linear weight of the backbone
    # Engram
    engram_lr: float = 5.0  # multiplies the learning rate of Engram tables: published
    engram_lr_projections: bool = False  # and of Engram projections; the report speaks of tables

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr must be positive, got {self.lr}")
        for key in ("beta1", "beta2", "momentum", "sinkhorn_momentum"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optimizer.{key} must be in [0, 1), got {getattr(self, key)}")
        for key in (
            *("eps", "weight_decay", "clip", "update_rms", "ns_eps", "ns_steps", "ns_final_steps"),
            *("sinkhorn_steps", "sinkhorn_threshold", "sinkhorn_rms", "sinkhorn_eps", "engram_lr"),
        ):
            if getattr(self, key) < 0:
                raise ValueError(f"optimizer.{key} must not be negative, got {getattr(self, key)}")
        for key in ("ns_coefficients", "ns_final_coefficients"):
            if len(getattr(self, key)) != 3:
                raise ValueError(f"optimizer.{key} must be three numbers (a, b, c), got {list(getattr(self, key))}")

    @property
    def newton_schulz(self) -> tuple[Coefficients, ...]:
        """Coefficients of every step, in order."""
        first, final = self.ns_coefficients, self.ns_final_coefficients
        steps = (first,) * self.ns_steps + (final,) * self.ns_final_steps
        return tuple((a, b, c) for a, b, c in steps)
