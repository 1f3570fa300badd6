"""Merging a LoRA adapter in PEFT's format: weight + scaling * B @ A, computed in float32, rounded once by the storage.

The adapter's module names are released names without `.weight` (`layers.3.attn.wq_a`, `layers.3.ffn.experts.5.w1`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.finite import require_finite
from megatron_dsv41.checkpoint.mapping import Binding
from megatron_dsv41.checkpoint.regions import Region, region_of, shape_of
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder
from megatron_dsv41.checkpoint.sources import StateSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(?:model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Settings under which `weight + scaling * B @ A` is not the adapted weight.
UNSUPPORTED = ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "target_parameters", "megatron_config")
REPLACED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that change the base weights, too


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two factors of one weight: names of A [r, in] and B [out, r], and what their product is multiplied by."""

    a: str
    b: str
    scaling: float


class LoraAdapter:
    """An adapter folder: the pair of every adapted weight, by released name. Its tensors are read when needed."""

    def __init__(self, folder: SafetensorsFolder, pairs: Mapping[str, Pair]):
        self.folder = folder
        self.pairs = pairs

    @classmethod
    def load(cls, path: Path | str) -> LoraAdapter:
        """ValueError naming what cannot be merged: another kind of adapter, an unpaired tensor, a wrong rank, a
        target that no tensor belongs to, or a tensor of no target.
        """
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} is not a LoRA adapter: it has no {CONFIG}")
        try:
            config = json.loads((path / CONFIG).read_text())
            settings = _Settings.read(path, config)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / CONFIG}: {error!r}" if isinstance(error, KeyError) else str(error)) from error
        folder = SafetensorsFolder(path, single=WEIGHTS)
        factors: dict[str, dict[str, str]] = {}
        for name in folder.tensors:
            match = KEY.fullmatch(name)
            if not match:
                raise ValueError(f"{path / WEIGHTS}: {name} is not a LoRA matrix (base_model.model.X.lora_A.weight)")
            factors.setdefault(match["module"], {})[match["side"]] = name
        settings.check_targets(factors)
        return cls(folder, {f"{module}.weight": settings.pair(folder, module, f) for module, f in factors.items()})

    def delta(self, weight: str, region: Region) -> Tensor:
        """What is added to a region [rows, columns] of a weight, float32."""
        pair = self.pairs[weight]
        b, a = self._read(pair.b, region[0]), self._read(pair.a, range(self.folder.info(pair.a).shape[0]), region[1])
        return (b @ a).mul_(pair.scaling)

    def _read(self, name: str, *region: range) -> Tensor:
        data = self.folder.read(name, *region)
        require_finite(data, self.folder.path / WEIGHTS, name)
        return data.float()


class MergedSource:
    """Another source with an adapter added: adapted tensors are float32, the others are as they were.

    ValueError naming adapted weights that the model does not have, or that have another shape.
    """

    def __init__(self, base: StateSource, adapter: LoraAdapter, bindings: Sequence[Binding]):
        self.base, self.adapter = base, adapter
        self.bindings = {binding.native: binding for binding in bindings}
        shapes = {name: binding.part_shape for binding in bindings for name in binding.released}
        for weight, pair in adapter.pairs.items():
            path = adapter.folder.path / WEIGHTS
            if weight not in shapes:
                raise ValueError(f"{path}: the model has no {weight} to merge {pair.a} into")
            found = (adapter.folder.info(pair.b).shape[0], adapter.folder.info(pair.a).shape[1])
            if found != shapes[weight]:
                raise ValueError(f"{path}: {pair.b} and {pair.a} make {list(found)}, {weight} is {shapes[weight]}")
        self._touched = {b.native for b in bindings if any(name in adapter.pairs for name in b.released)}

    def names(self) -> Sequence[str]:
        """Native names."""
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Native shape."""
        return self.base.shape(name)

    def dtype(self, name: str) -> str:
        """F32 where something is added."""
        return "F32" if self.touches(name) else self.base.dtype(name)

    def touches(self, name: str) -> bool:
        """Whether the adapter changes a native tensor."""
        return name in self._touched

    def read(self, name: str, *cut: slice) -> Tensor:
        """A native tensor, or a region of it, merged."""
        values = self.base.read(name, *cut)
        if not self.touches(name):
            return values
        binding = self.bindings[name]
        region = region_of(binding.shape, cut)
        lead, part = region[: len(binding.via.lead)], region[len(binding.via.lead) :]
        merged = values.to(torch.float32, copy=True)
        parts = merged.view(-1, *shape_of(part)) if lead else merged[None]
        for values_part, i in zip(parts, binding.via.parts_of(lead), strict=True):
            if binding.released[i] in self.adapter.pairs:
                values_part += self.adapter.delta(binding.released[i], part)
        return merged

    def identity(self) -> Any:
        """Of the base and of the adapter."""
        base = self.base.identity()
        return base and [base, self.adapter.folder.fingerprint(), [p.scaling for p in self.adapter.pairs.values()]]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What `adapter_config.json` says."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    targets: str | list[str] | None
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> _Settings:
        where = path / CONFIG
        if config.get("peft_type") != "LORA":
            raise ValueError(f"{where}: peft_type is {config.get('peft_type')!r}, only LORA can be merged")
        wrong = [key for key in UNSUPPORTED if config.get(key)]
        if config.get("bias", "none") != "none":
            wrong.append("bias")
        if str(config.get("init_lora_weights", True)).startswith(REPLACED_BASE):
            wrong.append("init_lora_weights")
        if wrong:
            raise ValueError(f"{where}: adapters with {wrong[0]}={config[wrong[0]]!r} cannot be merged")
        rank, alpha = config["r"], config["lora_alpha"]
        if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
            raise ValueError(f"{where}: r must be a positive integer and lora_alpha a number, got {rank!r}, {alpha!r}")
        return cls(
            path,
            rank,
            float(alpha),
            bool(config.get("use_rslora")),
            cast("str | list[str] | None", config.get("target_modules")),
            config.get("rank_pattern") or {},
            config.get("alpha_pattern") or {},
        )

    def check_targets(self, modules: Mapping[str, Any]) -> None:
        """ValueError for a module that is no target, and for a target of no module."""
        if self.targets is None or self.targets == "all-linear":
            return
        matches = {module: list(self._matching(module)) for module in modules}
        stray = [module for module, found in matches.items() if not found]
        if stray:
            raise ValueError(f"{self.path / WEIGHTS}: {stray[0]} is none of the target_modules {self.targets}")
        used = {target for found in matches.values() for target in found}
        idle = [target for target in self._patterns() if target not in used]
        if idle:
            raise ValueError(f"{self.path / CONFIG}: no tensor of {WEIGHTS} belongs to the target {idle[0]!r}")

    def pair(self, folder: SafetensorsFolder, module: str, factors: Mapping[str, str]) -> Pair:
        """The factors of a module, checked, with their scaling."""
        if set(factors) != {"A", "B"}:
            (side,) = factors
            raise ValueError(f"{self.path / WEIGHTS}: {factors[side]} has no lora_{'AB'.replace(side, '')} beside it")
        rank = _by_pattern(self.rank_pattern, module, self.rank)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        a, b = folder.info(factors["A"]), folder.info(factors["B"])
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            raise ValueError(
                f"{self.path / WEIGHTS}: {a.name} is {list(a.shape)} and {b.name} is {list(b.shape)}, "
                f"{CONFIG} says rank {rank}"
            )
        return Pair(a.name, b.name, alpha / (math.sqrt(rank) if self.rslora else rank))

    def _patterns(self) -> list[str]:
        return [self.targets] if isinstance(self.targets, str) else list(self.targets or ())

    def _matching(self, module: str) -> Iterator[str]:
        """A string is a regular expression of whole names, a list holds names or their ends."""
        for target in self._patterns():
            whole_name = isinstance(self.targets, str)
            if re.fullmatch(target, module) if whole_name else module == target or module.endswith(f".{target}"):
                yield target


def _by_pattern[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first pattern that the end of a module's name matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
