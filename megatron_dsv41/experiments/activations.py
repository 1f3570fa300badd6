"""What a forward and backward pass keeps and needs beside the weights, in bytes, as the fastest kernels do it.

Small things (slots, denominators, router scores, compressed latents) are left out: together about 1 %. The definitions
(plain torch) keep more. Compared with one H200 in docs/benchmarks.md.
"""

from __future__ import annotations

import dataclasses

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.run_config import Recompute

HEAD_BLOCK = 8192  # vocabulary rows whose logits exist at a time (ops.head.blocked)


@dataclasses.dataclass(frozen=True)
class Division:
    """How many ranks share a token's tensors: heads, inner widths and vocabulary; what lies between sites; experts."""

    tensor: int = 1
    between_sites: int = 1  # as `tensor` with sequence parallelism, which gathers the inputs of sites
    expert_tensor: int = 1  # ranks that have one expert, and its tokens
    gathered: int = 0  # ranks whose tokens a rank gathers, and sums its experts' outputs for; 0: it gathers none

    @property
    def dispatched(self) -> float:
        """Tokens that reach a rank's experts, over those of its tensor group."""
        return self.expert_tensor / self.tensor


WHOLE = Division()


def activation_bytes(
    config: DSV41Config, recompute: Recompute, plan: LayerPlan | None = None, divided: Division = WHOLE
) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    none: streams before both sites; input, normed input and output of both sites; q latents before and after their
    norm, rotated q, attention output before and after the inverse rotation, grouped output, window KV; inputs of all
    chosen experts and, with the shared one's, gate, up and product; with Engram the rows read, keys, values and
    streams. selective: all but what is as wide as the heads. block: the input streams alone, and so for the first layer
    of a stage with full.
    """
    c, d = config, config.hidden_size
    if recompute in ("block", "full"):
        return c.hc_mult * d * dtype_bytes(c) / divided.between_sites
    width = c.num_attention_heads * c.head_dim if recompute == "none" else 0
    between = (2 * c.hc_mult + 4) * d
    if plan is not None and plan.has_engram:
        between += c.engram_columns * c.engram_head_dim + (2 * c.hc_mult + 1) * d
    inside = 2 * d + 2 * c.q_lora_rank + 2 * c.head_dim + divided.dispatched * c.num_experts_per_tok * d
    shared = 3 * width + c.o_groups * c.o_lora_rank + 3 * _inner(c)
    return (between / divided.between_sites + inside + shared / divided.tensor) * dtype_bytes(c)


def layer_working_bytes(config: DSV41Config, divided: Division = WHOLE) -> float:
    """Bytes per token of what the backward pass of one layer makes and drops, where it is most.

    That is inside the experts: the gradients of their outputs and of the products that w2 multiplied, before the
    products themselves can go; or, before the latter are made, gradients gathered from other ranks. Beside them the
    gradient of the streams and the fp32 one of the site's output.
    """
    c, d = config, config.hidden_size
    rows, gathered = (divided.dispatched * copies * d for copies in (c.num_experts_per_tok, divided.gathered))
    experts = max(_inner(c) / divided.tensor, gathered) + rows
    return (experts + c.hc_mult * d / divided.between_sites) * dtype_bytes(c) + 4 * d


def head_working_bytes(config: DSV41Config, whole_logits: bool, divided: Division = WHOLE) -> float:
    """Bytes per token of the head's backward pass: fp32 logits and their gradient, whole, or of a block of rows.

    A block has its gradient in fp32 and in two parts of the training dtype, beside two fp32 gradients of the input.
    """
    rows = config.vocab_size / divided.tensor
    if whole_logits:
        return 2 * 4 * rows
    return min(HEAD_BLOCK, rows) * (4 + 2 * dtype_bytes(config)) + 2 * 4 * config.hidden_size


def gradient_working_bytes(config: DSV41Config, experts: int) -> float:
    """Bytes of the largest gradient before it is added to its buffer: w1 and w3 of the `experts` that a rank holds."""
    return 2 * experts * config.hidden_size * config.moe_intermediate_size * dtype_bytes(config)


def dtype_bytes(config: DSV41Config) -> int:
    """Bytes of one weight or activation in the training dtype."""
    return 4 if config.dtype == "float32" else 2


def _inner(c: DSV41Config) -> int:
    return (c.num_experts_per_tok + c.n_shared_experts) * c.moe_intermediate_size
