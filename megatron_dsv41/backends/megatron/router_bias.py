"""Aux-free balancing: after each step every router bias moves one step towards equal load (SPEC 11.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.backends.megatron.model import DSV41Model


@torch.no_grad()
def update_router_biases(
    stages: Sequence[DSV41Model], speed: float, data_group: ProcessGroup, pipeline_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Sum each layer's load over the micro-batches of the step and over `data_group`, move its biases, forget the load.

    b_e += speed * sign(mean load - load_e), text and image apart; a modality without tokens moves nothing.
    Returns of all layers of the model, for the log: load fp32 [layers, 2, E] (text, image) and `layer_sums`, summed
    likewise.
    """
    model = stages[0].architecture
    load_L2E = stages[0].expert_load.new_zeros(model.num_hidden_layers, 2, model.n_routed_experts)
    sums_LM = stages[0].layer_sums.new_zeros(model.num_hidden_layers, stages[0].layer_sums.shape[1])
    for stage in stages:
        here = slice(stage.stage.start, stage.stage.stop)
        load_L2E[here], sums_LM[here] = stage.expert_load, stage.layer_sums
        stage.expert_load.zero_()
        stage.layer_sums.zero_()
    torch.distributed.all_reduce(load_L2E, group=data_group)
    torch.distributed.all_reduce(sums_LM, group=data_group)
    for stage in stages:
        for layer, block in stage.layers.items():
            gate: Any = block.get_submodule("ffn.gate")
            load_2E = load_L2E[int(layer)]
            for bias_E, load_E in ((gate.bias, load_2E[0]), (gate.bias_vl, load_2E[1])):
                bias_E += speed * torch.sign(load_E.mean() - load_E)
    if pipeline_group.size() > 1:
        torch.distributed.all_reduce(load_L2E, group=pipeline_group)
        torch.distributed.all_reduce(sums_LM, group=pipeline_group)
    return load_L2E, sums_LM
