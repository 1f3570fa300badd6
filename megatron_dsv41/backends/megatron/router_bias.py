"""Aux-free balancing: after each step every router bias moves one step towards equal load (SPEC 11.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dsv41.backends.megatron.model import DSV41Model


@torch.no_grad()
def update_router_biases(
    stages: Sequence[DSV41Model], speed: float, group: torch.distributed.ProcessGroup
) -> dict[int, Tensor]:
    """Sum each layer's load over the micro-batches of the step and over `group`, move its biases, forget the load.

    b_e += speed * sign(mean load - load_e), text and image apart; a modality without tokens moves nothing.
    Returns layer -> load fp32 [2, E] (text, image) for the log.
    """
    loads = {}
    for stage in stages:
        if not len(stage.layers):
            continue
        torch.distributed.all_reduce(stage.expert_load, group=group)
        for load_2E, (layer, block) in zip(stage.expert_load.clone(), stage.layers.items(), strict=True):
            gate = block.ffn.gate
            for bias_E, load_E in ((gate.bias, load_2E[0]), (gate.bias_vl, load_2E[1])):
                bias_E += speed * torch.sign(load_E.mean() - load_E)
            loads[int(layer)] = load_2E
        stage.expert_load.zero_()
    return loads


def load_metrics(loads: dict[int, Tensor]) -> dict[str, Tensor]:
    """Per layer: max violation (largest load over the mean, minus 1) and entropy as a share of its maximum."""
    metrics = {}
    for layer, load_2E in loads.items():
        load_E = load_2E.sum(0)
        share_E = load_E / load_E.sum().clamp_min(1.0)
        entropy = -torch.xlogy(share_E, share_E).sum() / torch.log(torch.tensor(float(share_E.numel())))
        metrics[f"router/max_violation/{layer}"] = share_E.max() * share_E.numel() - 1.0
        metrics[f"router/entropy/{layer}"] = entropy
    return metrics
