"""Which implementation of an op runs: chosen by name when the model is built, never by probing, never in silence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_dsv41.config import nearest

# op -> provider -> "module:function". Every op has "ref", the definition; other providers have the same signature.
# Provider modules are imported when they are chosen, so optional packages stay optional.
PROVIDERS: dict[str, dict[str, str]] = {
    "csa2.sparse_attend": {
        "ref": "megatron_dsv41.ops.csa2.ref:sparse_attend",
        "triton": "megatron_dsv41.ops.csa2.triton_attend:sparse_attend",
        "hopper": "megatron_dsv41.ops.csa2.hopper_attend:sparse_attend",
        "flash_mla": "megatron_dsv41.ops.csa2.flash_mla_attend:sparse_attend",
        "cudnn": "megatron_dsv41.ops.csa2.cudnn_attend:sparse_attend",
    },
    "csa2.pool": {"ref": "megatron_dsv41.ops.csa2.ref:pool"},
    "csa2.select": {
        "ref": "megatron_dsv41.ops.csa2.ref:select",
        "triton": "megatron_dsv41.ops.csa2.triton_select:select",
    },
    "csa2.dense_teacher": {"ref": "megatron_dsv41.ops.csa2.ref:dense_teacher"},
    "csa2.index_divergence": {
        "ref": "megatron_dsv41.ops.csa2.ref:index_divergence",
        "triton": "megatron_dsv41.ops.csa2.triton_divergence:index_divergence",
    },
    "mhc.collapse": {
        "ref": "megatron_dsv41.ops.mhc.ref:collapse",
        "triton": "megatron_dsv41.ops.mhc.triton_site:collapse",
    },
    "mhc.expand": {
        "ref": "megatron_dsv41.ops.mhc.ref:expand",
        "triton": "megatron_dsv41.ops.mhc.triton_site:expand",
    },
    "mhc.site": {
        "ref": "megatron_dsv41.ops.mhc.ref:site",
        "triton": "megatron_dsv41.ops.mhc.triton_site:site",
        "hopper": "megatron_dsv41.ops.mhc.hopper_site:site",
    },
    "engram.hash": {
        "ref": "megatron_dsv41.ops.engram.ref:hash_tokens",
        "triton": "megatron_dsv41.ops.engram.triton_hash:hash_tokens",
    },
    "engram.read_rows": {
        "ref": "megatron_dsv41.ops.engram.ref:read_rows",
        "triton": "megatron_dsv41.ops.engram.triton_rows:read_rows",
    },
    "engram.encode_rows": {
        "ref": "megatron_dsv41.ops.engram.ref:encode_rows",
        "triton": "megatron_dsv41.ops.engram.triton_rows:encode_rows",
    },
    "engram.merge": {
        "ref": "megatron_dsv41.ops.engram.ref:merge",
        "triton": "megatron_dsv41.ops.engram.triton_merge:merge",
    },
    "engram.gate": {
        "ref": "megatron_dsv41.ops.engram.ref:gate",
        "triton": "megatron_dsv41.ops.engram.triton_gate:gate",
    },
    "sinkhorn.update": {
        "ref": "megatron_dsv41.ops.sinkhorn.ref:sinkhorn_update",
        "triton": "megatron_dsv41.ops.sinkhorn.triton_update:sinkhorn_update",
    },
    "head.losses": {
        "ref": "megatron_dsv41.ops.head.ref:losses",
        "blocked": "megatron_dsv41.ops.head.blocked:losses",
    },
    "linear.wide": {
        "ref": "megatron_dsv41.ops.linear.ref:wide_linear",
        "split": "megatron_dsv41.ops.linear.split:wide_linear",
    },
    "norm.rms_norm": {
        "ref": "megatron_dsv41.ops.norm.ref:rms_norm",
        "triton": "megatron_dsv41.ops.norm.triton_rms:rms_norm",
    },
    "rope.rotate": {
        "ref": "megatron_dsv41.ops.rope.ref:rotate",
        "triton": "megatron_dsv41.ops.rope.triton_rotate:rotate",
    },
    "rope.rotate_owned": {
        "ref": "megatron_dsv41.ops.rope.ref:rotate_owned",
        "triton": "megatron_dsv41.ops.rope.triton_rotate:rotate_owned",
    },
    "quant.fake_fp8": {
        "ref": "megatron_dsv41.ops.quant.ref:fake_fp8",
        "triton": "megatron_dsv41.ops.quant.triton_fake:fake_fp8",
    },
    "quant.fake_mxfp4": {
        "ref": "megatron_dsv41.ops.quant.ref:fake_mxfp4",
        "triton": "megatron_dsv41.ops.quant.triton_fake:fake_mxfp4",
    },
    "quant.fake_fp4": {
        "ref": "megatron_dsv41.ops.quant.ref:fake_fp4",
        "triton": "megatron_dsv41.ops.quant.triton_fake:fake_fp4",
    },
    "routing.route": {"ref": "megatron_dsv41.ops.routing.ref:route"},
    "routing.experts": {
        "ref": "megatron_dsv41.ops.routing.ref:experts",
        "grouped": "megatron_dsv41.ops.routing.grouped:experts",
        "grouped_fp8": "megatron_dsv41.ops.routing.grouped_fp8:experts",
    },
    "routing.spread_rows": {
        "ref": "megatron_dsv41.ops.routing.ref:spread_rows",
        "triton": "megatron_dsv41.ops.routing.triton_rows:spread_rows",
    },
    "routing.sum_rows": {
        "ref": "megatron_dsv41.ops.routing.ref:sum_rows",
        "triton": "megatron_dsv41.ops.routing.triton_rows:sum_rows",
    },
    "routing.swiglu": {
        "ref": "megatron_dsv41.ops.routing.ref:swiglu",
        "triton": "megatron_dsv41.ops.routing.triton_swiglu:swiglu",
    },
}


def providers(op: str) -> tuple[str, ...]:
    """Names of every implementation of `op`."""
    if op not in PROVIDERS:
        raise ValueError(f"no op {op!r}{nearest(op, set(PROVIDERS))}")
    return tuple(PROVIDERS[op])


def load(op: str, provider: str) -> Callable[..., Any]:
    """The function behind one provider. ValueError for unknown names, ImportError naming a missing package."""
    if provider not in providers(op):
        raise ValueError(f"op {op} has no provider {provider!r}; it has {', '.join(providers(op))}")
    module, function = PROVIDERS[op][provider].split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ImportError(f"op {op}: provider {provider!r} needs the package {error.name!r}: {error}") from error


def read_choice(entries: Sequence[str]) -> dict[str, str]:
    """Entries "OP=PROVIDER" of a command line as the mapping that `Ops` takes. ValueError for one without "="."""
    bad = [entry for entry in entries if "=" not in entry]
    if bad:
        raise ValueError(f"--ops {bad[0]}: write OP=PROVIDER, for example csa2=triton")
    return dict(entry.split("=", 1) for entry in entries)


def choose(choice: Mapping[str, str]) -> dict[str, str]:
    """Provider of every op by name alone: nothing is imported. ValueError for names that are not there."""
    families = {op.split(".")[0] for op in PROVIDERS}
    for key, wanted in choice.items():
        if key != "*" and key not in PROVIDERS and key not in families:
            raise ValueError(f"ops.{key} is neither an op nor a family{nearest(key, set(PROVIDERS) | families)}")
        known = {name for op in PROVIDERS if key in ("*", op, op.split(".")[0]) for name in PROVIDERS[op]}
        for name in _names(wanted) if key not in PROVIDERS else [wanted]:
            if name not in known:
                whose = f"op {key} has no provider" if key in PROVIDERS else f"ops.{key}: no op has a provider"
                raise ValueError(f"{whose} {name!r}{nearest(name, known)}; there are {', '.join(sorted(known))}")
    return {op: _provider(op, choice) for op in PROVIDERS}


def _provider(op: str, choice: Mapping[str, str]) -> str:
    if op in choice:
        return choice[op]
    preferred = _names(choice.get(op.split(".")[0], choice.get("*", "")))
    return next((name for name in preferred if name in PROVIDERS[op]), "ref")


class Ops:
    """The chosen implementation of every op. `ops["csa2.sparse_attend"](...)` calls it.

    `choice` maps an op, or a family such as "csa2", or "*" to a provider; the most specific entry wins. A family or "*"
    may name several, such as "hopper, triton": every op takes the first that it has, or else its definition, which the
    start-up table shows. ValueError for a name that no op there has.
    """

    def __init__(self, choice: Mapping[str, str] | None = None):
        self.chosen = choose(choice or {})
        self._functions = {op: load(op, provider) for op, provider in self.chosen.items()}

    def __getitem__(self, op: str) -> Callable[..., Any]:
        return self._functions[op]

    def table(self) -> str:
        """op -> provider, one line each, for the start-up log."""
        width = max(map(len, self.chosen))
        return "\n".join(f"{op:<{width}}  {provider}" for op, provider in sorted(self.chosen.items()))


def _names(preference: str) -> list[str]:
    return [name.strip() for name in preference.split(",") if name.strip()]
