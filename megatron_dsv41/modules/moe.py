"""Router, routed experts and the shared expert of one layer (SPEC 11)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.layout import from_flat, to_flat
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.numerics import rounded_sum
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase


class Routing(NamedTuple):
    """Router decision: indices int64 [T, k], weights fp32 [T, k]; weighted balance loss []; load fp32 [2, E]."""

    indices: Tensor
    weights: Tensor
    balance_loss: Tensor
    expert_load: Tensor


class Router(nn.Module):
    """Scores in fp32; a bias per modality steers selection only. The biases are buffers: no gradient, no decay."""

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: DSV41Config, phase: Phase, primitives: Primitives, ops: Ops):
        super().__init__()
        self.config, self.phase, self.primitives, self.ops = config, phase, primitives, ops
        weight = torch.empty(config.n_routed_experts, config.hidden_size, dtype=primitives.dtype)
        self.weight = primitives.parameter(weight.normal_(std=config.initializer_range), "ffn.gate.weight")
        for name in ("bias", "bias_vl"):
            self.register_buffer(name, torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor, batch: Batch, batch_size: int) -> Routing:
        """x [T, d] -> the decision for every token."""
        config, documents = self.config, batch.documents
        logits_TE = self.ops["linear.wide"](x_TD, self.weight)
        bias_TE = torch.where(documents.image_T[:, None], self.bias_vl, self.bias)
        indices_TK, weights_TK, scores_TE = self.ops["routing.route"](
            logits_TE, bias_TE, config.num_experts_per_tok, config.routed_scaling_factor
        )
        chosen_TE = torch.zeros_like(scores_TE).scatter(1, indices_TK, 1.0)
        balance_loss = self._balance_loss(scores_TE, chosen_TE, documents.alive_T, batch_size)
        modality_2T = torch.stack([documents.alive_T & ~documents.image_T, documents.alive_T & documents.image_T])
        expert_load = modality_2T.to(torch.float32) @ chosen_TE.to(torch.float32)
        return Routing(indices_TK, weights_TK, balance_loss, expert_load)

    def _balance_loss(self, scores_TE: Tensor, chosen_TE: Tensor, alive_T: Tensor, batch_size: int) -> Tensor:
        """Weighted sum_e f_e P_e per row, mean over rows; dead tokens do not count.

        A sequence shard knows the frequencies of the whole row and contributes its part of P: the parts add up.
        """
        config, sum_sequence = self.config, self.primitives.sum_sequence
        alive = alive_T.to(scores_TE.dtype).view(batch_size, -1, 1)
        tokens = sum_sequence(alive.sum(1)).clamp_min(1.0)
        count = sum_sequence((chosen_TE.view(batch_size, -1, config.n_routed_experts) * alive).sum(1))
        frequency = count * (config.n_routed_experts / config.num_experts_per_tok) / tokens
        share_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        probability = (share_TE.view(batch_size, -1, config.n_routed_experts) * alive).sum(1) / tokens
        return (frequency * probability).sum(-1).mean() * self.phase.balance_loss_weight


class SharedExpert(nn.Module):
    """The expert that every token passes."""

    def __init__(self, config: DSV41Config, primitives: Primitives, ops: Ops):
        super().__init__()
        self.limit, self.ops = config.swiglu_limit, ops
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = primitives.linear("ffn.shared_experts.w1", d, inner)
        self.w3 = primitives.linear("ffn.shared_experts.w3", d, inner)
        self.w2 = primitives.linear("ffn.shared_experts.w2", inner, d)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        return self.w2(self.ops["routing.swiglu"](self.w1(x), self.w3(x), self.limit))


class MoE(nn.Module):
    """FFN site. x [s, b, d] in; y [s, b, d] and the Routing out. Routed and shared parts add in fp32, cast once."""

    def __init__(self, config: DSV41Config, phase: Phase, primitives: Primitives, ops: Ops):
        super().__init__()
        self.primitives = primitives
        self.gate = Router(config, phase, primitives, ops)
        self.experts = primitives.experts(config)
        self.shared_experts = SharedExpert(config, primitives, ops)

    def forward(self, x_SBD: Tensor, batch: Batch) -> tuple[Tensor, Routing]:
        """See class."""
        x_SBD = self.primitives.enter_site(x_SBD)
        x_TD = to_flat(x_SBD)
        routing = self.gate(x_TD, batch, x_SBD.shape[1])
        x_TD, weights_TK = self.primitives.fan_out(x_TD), self.primitives.fan_out(routing.weights)
        finish_routed = self.experts.begin(x_TD, routing.indices, weights_TK)
        shared_TD = self.shared_experts(x_TD)
        y_TD = rounded_sum(finish_routed(), shared_TD, x_TD.dtype)
        return self.primitives.leave_site(from_flat(y_TD, x_SBD.shape[1])), routing
