"""What a step says about each layer: router load, auxiliary losses, quality of selections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.ops.csa2.quality import QUALITY
from megatron_dsv41.phase import Phase


def layer_metrics(
    config: DSV41Config, phase: Phase, load_L2E: Tensor, sums_LM: Tensor, passes: int
) -> dict[str, Tensor]:
    """Metrics by name from the sums of one step over `passes` micro-batches on all data-parallel ranks.

    load_L2E [layers, 2, E]: tokens per expert. sums_LM: balance loss, index loss, QUALITY. Context shards contribute
    parts of one value, micro-batches values of their own.
    """
    balance, index = (sums_LM[:, :2] / passes).unbind(1)
    metrics = load_metrics(load_L2E) | {"balance_loss": balance.sum()}
    for plan in plan_layers(config):
        if plan.owns_selection:
            if phase.index_loss != "off":
                metrics[f"index_kl/{plan.layer}"] = index[plan.layer]
            metrics |= _selection_metrics(plan.layer, dict(zip(QUALITY, sums_LM[plan.layer, 2:], strict=True)))
    return metrics


def _selection_metrics(layer: int, quality: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over probed queries; absent where no query had more entries to choose from than it selects."""
    found = {}
    if quality["queries"] > 0:
        found = {f"index_{kind}/{layer}": quality[kind] / quality["queries"] for kind in ("recall", "mass")}
    if quality["compared"] > 0:
        found[f"index_overlap/{layer}"] = quality["overlap"] / quality["compared"]
    return found


def load_metrics(load_L2E: Tensor) -> dict[str, Tensor]:
    """Per layer: max violation (largest load over the mean, minus 1) and entropy as a share of its maximum."""
    metrics = {}
    for layer, load_E in enumerate(load_L2E.sum(1)):
        share_E = load_E / load_E.sum().clamp_min(1.0)
        entropy = -torch.xlogy(share_E, share_E).sum() / math.log(share_E.numel())
        metrics[f"router/max_violation/{layer}"] = share_E.max() * share_E.numel() - 1.0
        metrics[f"router/entropy/{layer}"] = entropy
    return metrics
