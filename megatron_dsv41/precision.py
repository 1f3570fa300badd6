"""In which precision linears multiply: the settings, the roles they are about, and what low precision cannot take.

Torch-free, so that a plan applies what the start of a run applies. Weights, gradients and the optimizer keep the run's
precision: only the operands of products are rounded, each time they are used.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

from megatron_dsv41.config import DSV41Config

Split = Literal["column", "row"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe of Transformer Engine asks of a GPU (compute capability, least and first too high) and of sizes."""

    scales: str
    least: tuple[int, int]
    below: tuple[int, int] | None = None
    multiple: int = 16  # of both sides of a weight and of the tokens that it meets


RECIPES = {
    "delayed": Recipe("one per tensor, from the largest values of its last 1024 uses", (8, 9)),
    "current": Recipe("one per tensor, from its own largest value", (8, 9)),
    "block": Recipe("powers of two for 1x128 of activations and gradients, 128x128 of weights", (9, 0)),
    "mxfp8": Recipe("powers of two for 32 values", (10, 0), (12, 0), 32),
    "nvfp4": Recipe("E4M3 for 16 values, values in E2M1", (10, 0), None, 32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Which linears multiply in FP8 or FP4, by Transformer Engine. `roles`: patterns such as "attn.wq_*"."""

    fp8: Literal["off", "delayed", "current", "block", "mxfp8"] = "off"
    fp4: Literal["off", "nvfp4"] = "off"
    roles: tuple[str, ...] = ("*",)  # among those that may; the others keep the run's precision whatever is asked

    def __post_init__(self) -> None:
        if self.fp8 != "off" and self.fp4 != "off":
            raise ValueError(f"precision.fp8={self.fp8} and precision.fp4={self.fp4} exclude each other: set one")

    @property
    def name(self) -> str | None:
        """The recipe, if any."""
        return next((name for name in (self.fp8, self.fp4) if name != "off"), None)

    @property
    def asked(self) -> str:
        """The setting that asks for the recipe, as a user writes it."""
        return f"precision.fp4={self.fp4}" if self.fp8 == "off" else f"precision.fp8={self.fp8}"

    @property
    def remedy(self) -> str:
        """What turns it off."""
        return f"set {self.asked.split('=')[0]}=off"


@dataclasses.dataclass(frozen=True)
class LinearRole:
    """Sizes of a role's whole weight, and along which side tensor parallelism splits it."""

    d_in: int
    d_out: int
    split: Split | None = None


# Products that no recipe reaches: role -> why.
KEPT = {
    "attn.wo_a": "block-diagonal over the output groups, which Transformer Engine has no product for",
    "attn.compressor.*": "many layers read what it makes",
    "attn.indexer.*": "decides a selection",
    "ffn.gate": "decides a selection",
    "ffn.experts": "ops.routing.experts decides",
    "*_hc.fn": "steers the residual streams",
    "head": "logits are fp32",
}


def linear_roles(config: DSV41Config) -> dict[str, LinearRole]:
    """Role -> its linear, of every role that may multiply in low precision."""
    d, inner = config.hidden_size, config.moe_intermediate_size
    roles = {
        "attn.wq_a": LinearRole(d, config.q_lora_rank),
        "attn.wq_b": LinearRole(config.q_lora_rank, config.num_attention_heads * config.head_dim, "column"),
        "attn.wkv": LinearRole(d, config.head_dim),
        "attn.wo_b": LinearRole(config.o_groups * config.o_lora_rank, d, "row"),
        "ffn.shared_experts.w1": LinearRole(d, inner, "column"),
        "ffn.shared_experts.w3": LinearRole(d, inner, "column"),
        "ffn.shared_experts.w2": LinearRole(inner, d, "row"),
    }
    if config.engram_layer_ids:
        width = config.engram_columns * config.engram_head_dim
        roles["engram.wkv"] = LinearRole(width, (config.hc_mult + 1) * d)
    return roles


def low_roles(config: DSV41Config, precision: Precision) -> dict[str, LinearRole]:
    """Role -> its linear, of every role that multiplies in low precision. ValueError for a pattern of none."""
    if precision.name is None:
        return {}
    roles = linear_roles(config)
    for pattern in precision.roles:
        if not fnmatch.filter(roles, pattern):
            why = next((why for kept, why in KEPT.items() if fnmatch.fnmatch(pattern, kept)), None)
            what = f"keeps the run's precision: {why}" if why else "names no linear"
            raise ValueError(f"precision.roles: {pattern!r} {what}; there are {', '.join(roles)}")
    chosen = {role for pattern in precision.roles for role in fnmatch.filter(roles, pattern)}
    return {role: linear for role, linear in roles.items() if role in chosen}


def check_sizes(config: DSV41Config, precision: Precision, tensor: int, tokens: int, tokens_between_sites: int) -> None:
    """ValueError for the first linear whose part on a rank is not of the recipe's multiple.

    tensor: ranks that split columns and rows. tokens: of a rank in one forward pass, inside sites and between them
    (Engram's).
    """
    if precision.name is None:
        return
    multiple = RECIPES[precision.name].multiple
    for role, linear in low_roles(config, precision).items():
        sides = {"inputs": linear.d_in, "outputs": linear.d_out}
        split = {"column": "outputs", "row": "inputs"}.get(linear.split or "")
        met = tokens_between_sites if role.startswith("engram.") else tokens
        for side, size in (*sides.items(), ("tokens", met)):
            here = size // tensor if side == split else size
            if here % multiple:
                shared = f" ({size} split by parallel.tp {tensor})" if here != size else ""
                lengths = "change data.seq_length or batch.micro"
                fix = lengths if side == "tokens" else f"leave {role} out of precision.roles"
                raise ValueError(
                    f"{precision.asked}: {role} has {here} {side}{shared}, not a multiple of {multiple}: {fix}, or "
                    f"{precision.remedy}"
                )


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a process can compute with: its GPU's compute capability, None without one; Transformer Engine installed."""

    capability: tuple[int, int] | None
    transformer_engine: bool


def check_machine(precision: Precision, machine: Machine) -> None:
    """ValueError when the recipe cannot run there."""
    if precision.name is None:
        return
    recipe, asked = RECIPES[precision.name], precision.asked
    needs = "compute capability " + describe_capability(recipe)
    if machine.capability is None:
        raise ValueError(f"{asked} needs a CUDA device of {needs}, and there is none: {precision.remedy}")
    too_new = recipe.below is not None and machine.capability >= recipe.below
    if machine.capability < recipe.least or too_new:
        able = [name for name, other in RECIPES.items() if machine.capability >= other.least and not other.below]
        fits = " or ".join(f"precision.{'fp4' if name == 'nvfp4' else 'fp8'}={name}" for name in able)
        here = ".".join(map(str, machine.capability))
        other = f"set {fits}, or {precision.remedy}" if fits else precision.remedy
        raise ValueError(f"{asked} needs {needs}, this GPU has {here}: {other}")
    if not machine.transformer_engine:
        raise ValueError(
            f"{asked} multiplies with the package transformer-engine, which is not installed: "
            f"pip install 'megatron-dsv41[te]', or {precision.remedy}"
        )


def describe_capability(recipe: Recipe) -> str:
    """The capabilities that a recipe runs on, in words."""
    least, below = (".".join(map(str, number)) if number else "" for number in (recipe.least, recipe.below))
    return f"{least} or higher" + (f", below {below}" if below else "")
