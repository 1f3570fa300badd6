"""Does a set of stored tensors make up a model? Names, shapes, dtypes and scale pairing, every deviation listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dsv41.checkpoint.mapping import Binding, Inventory, Shape, bind, carried_tensors, is_carried
from megatron_dsv41.checkpoint.storage import (
    FLOATS,
    QUANTIZED,
    SCALES,
    Storage,
    format_dtype,
    scale_name,
    stored_format,
    weight_name,
)
from megatron_dsv41.config import DSV41Config

LISTED = 10


@dataclasses.dataclass(frozen=True)
class Problem:
    """One deviation. kind: missing, extra, misshapen, dtype or scale."""

    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}{f' {self.detail}' if self.detail else ''}"


def check_released(found: Inventory, config: DSV41Config, ignore: Iterable[str] = ()) -> list[Problem]:
    """Deviations of released tensors (name -> dtype, shape) from what the config describes.

    A carried-through part (DSpark, vision, projector, delimiters) may be absent as a whole, never in pieces. Names in
    `ignore` count as present (tensors of shards that a partial folder lacks).
    """
    absent = set(ignore)
    expected = {name: (binding.part_shape, binding.storage) for binding in bind(config) for name in binding.released}
    parts = {_part(name) for name in found if is_carried(name)}
    expected |= {name: value for name, value in carried_tensors(config).items() if _part(name) in parts}
    problems: list[Problem] = []
    used: set[str] = set()
    for name, (shape, storage) in expected.items():
        if name in found:
            problems += _check_stored(name, shape, storage, found, absent)
            used |= {name, scale_name(name)} if found[name][0] in QUANTIZED else {name}
        elif name not in absent:
            problems.append(Problem("missing", name, f"{list(shape)}"))
    for name in found:
        if name not in used:
            problems += _check_unexpected(name, found, absent)
    return problems


def check_native(shapes: Mapping[str, Shape], bindings: Iterable[Binding]) -> list[Problem]:
    """Deviations of native tensors (name -> shape) from a model's bindings."""
    expected = {binding.native: binding.shape for binding in bindings}
    problems = [Problem("missing", name, f"{list(shape)}") for name, shape in expected.items() if name not in shapes]
    problems += [Problem("extra", name, f"{list(shape)}") for name, shape in shapes.items() if name not in expected]
    for name, shape in expected.items():
        if name in shapes and tuple(shapes[name]) != shape:
            problems.append(_misshapen(name, shape, shapes[name]))
    return problems


def refuse(path: Path | str, problems: list[Problem]) -> None:
    """ValueError with counts and the first ten deviations, if there are any."""
    if not problems:
        return
    kinds = sorted({problem.kind for problem in problems})
    counts = ", ".join(f"{sum(p.kind == kind for p in problems)} {kind}" for kind in kinds)
    shown = "\n  ".join(str(problem) for problem in problems[:LISTED])
    more = f"\n  ... and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    raise ValueError(f"{path}: tensors do not fit the config ({counts}):\n  {shown}{more}")


def _part(name: str) -> str:
    return name.split(".")[0].split("_")[0]


def _misshapen(name: str, expected: Shape, found: Shape) -> Problem:
    return Problem("misshapen", name, f"is {list(found)}, the config says {list(expected)}")


def _check_stored(name: str, shape: Shape, storage: Storage, found: Inventory, absent: set[str]) -> list[Problem]:
    dtype, stored_shape = found[name]
    form = stored_format(dtype, storage)
    if form is None:
        if dtype not in FLOATS:
            return [Problem("dtype", name, f"is {dtype}, expected {', '.join(FLOATS)} or a quantized format")]
        return [] if stored_shape == shape else [_misshapen(name, shape, stored_shape)]
    if len(shape) != 2:
        return [Problem("dtype", name, f"is {dtype}, but only matrices can be quantized")]
    problems: list[Problem] = []
    if stored_shape != form.data_shape(shape):
        problems.append(_misshapen(name, form.data_shape(shape), stored_shape))
    scale = scale_name(name)
    if scale not in found:
        if scale not in absent:
            problems.append(Problem("scale", name, f"is {dtype} and has no {scale}"))
        return problems
    scale_dtype, scale_shape = found[scale]
    if scale_dtype not in SCALES:
        problems.append(Problem("scale", scale, f"is {scale_dtype}, expected {', '.join(SCALES)}"))
    if scale_shape != form.scale_shape(shape):
        problems.append(_misshapen(scale, form.scale_shape(shape), scale_shape))
    return problems


def _check_unexpected(name: str, found: Inventory, absent: set[str]) -> list[Problem]:
    """A name that the table does not ask for: fine only inside a carried-through part, scales paired there too."""
    dtype, shape = found[name]
    if name.endswith(".scale"):
        weight = weight_name(name)
        if weight in found and found[weight][0] not in QUANTIZED:
            return [Problem("scale", name, f"belongs to {weight}, which is {found[weight][0]} and needs none")]
        if weight not in found and weight not in absent:
            return [Problem("scale", name, f"has no {weight}")]
    if not is_carried(name):
        return [Problem("extra", name, f"{dtype} {list(shape)}")]
    if dtype in QUANTIZED and scale_name(name) not in found and scale_name(name) not in absent:
        return [Problem("scale", name, f"is {dtype} and has no {scale_name(name)}")]
    return []


def describe(binding: Binding, dtype: str) -> str:
    """How a native tensor is stored, for messages."""
    form = stored_format(dtype, binding.storage)
    return f"{binding.native} ({format_dtype(form) if form else dtype} {list(binding.shape)})"
