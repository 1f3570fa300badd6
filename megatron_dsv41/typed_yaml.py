"""Typed values from YAML: a dataclass is the schema, and every mistake is a ValueError that names the key."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_dsv41.config import nearest


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file. ValueError naming `what` it is when it is missing, damaged or no mapping."""
    path = Path(path)
    try:
        values = yaml.load(path.read_text(), Loader=_Loader)
    except FileNotFoundError as error:
        raise ValueError(f"{what} {path} does not exist") from error
    except IsADirectoryError as error:
        raise ValueError(f"{what} {path} is a folder: name the YAML file") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{what} {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what} {path} must hold a mapping of sections, got {type(values).__name__}")
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put the value of one `section.key=value` string (the value is YAML) into nested `values`, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r} must look like section.key=value")
    *sections, last = key.split(".")
    if sections[:1] == ["ops"] or sections[:1] == ["megatron"]:
        sections, last = sections[:1], ".".join([*sections[1:], last])  # "ops.csa2.select" is one key
    place: Any = values
    for section in sections:
        if isinstance(place, list):
            place = _entry(place, section, override)
            continue
        inner = place.get(section)
        if isinstance(inner, list):
            place[section] = place = [copied(entry) for entry in inner]
            continue
        if inner is not None and not isinstance(inner, dict):
            raise ValueError(f"override {override!r}: {section} is a value, not a section")
        place = place.setdefault(section, {}) if inner is not None else _renew(place, section)
    try:
        place[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _entry(entries: list[Any], number: str, override: str) -> Any:
    if not number.isdigit() or int(number) >= len(entries):
        raise ValueError(
            f"override {override!r}: {override.split('.')[0]} has {len(entries)} entries, there is no {number}"
        )
    return entries[int(number)]


def _renew(place: dict[str, Any], section: str) -> dict[str, Any]:
    place[section] = {}
    return place[section]


def build(cls: type, values: Any, where: str = "") -> Any:
    """An instance of dataclass `cls` from a mapping; `where` is its dotted place in the file.

    ValueError for an unknown key (naming the nearest), a missing one, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the file'} must be a mapping of settings, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ValueError(f"{_dotted(where, str(key))} is not a setting{nearest(str(key), set(fields))}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and values.get(name) is None:
            raise ValueError(f"{_dotted(where, name)} is required and missing")
    return cls(**{k: _convert(hints[k], v, _dotted(where, k)) for k, v in values.items()})


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, {} if value is None else value, where)
    if origin is Literal:
        # YAML reads a bare off/on as a boolean.
        value = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
        if value not in arguments:
            raise ValueError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is dict:
        return _mapping(arguments[1], value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_convert(arguments[0], v, _dotted(where, str(number))) for number, v in enumerate(value))
    return _scalar(kind, value, where)


def _mapping(kind: Any, value: Any, where: str) -> dict[str, Any]:
    if kind is float and isinstance(value, str):
        return {value: 1.0}
    if kind is float and isinstance(value, list | tuple):
        if len(set(value)) != len(value):
            raise ValueError(f"{where} names a prefix twice: {list(value)}")
        return {str(v): 1.0 for v in value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, got {value!r}")
    return {str(k): v if kind is Any else _convert(kind, v, _dotted(where, str(k))) for k, v in value.items()}


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)  # 1e6 tokens
    if type(value) is not kind:
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value}")
    return value


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def copied(value: Any) -> Any:
    """A copy of nested mappings."""
    return {k: copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: `1e-20` is a number (YAML 1.1, which PyYAML reads, makes it a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
