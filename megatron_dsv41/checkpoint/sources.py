"""Where native tensors come from: a released folder, a native folder, tensors in memory, or a backend's checkpoint.

Everything that loads or exports a model goes through `StateSource`, so a distributed checkpoint is exported, and a
distributed model started from a released folder, by the same code: each reader asks for the rows it needs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.inventory import check_native, check_released, refuse
from megatron_dsv41.checkpoint.mapping import Binding, Inventory, bind, is_carried
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, Shard, TensorSpec
from megatron_dsv41.checkpoint.storage import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    Storage,
    config_dtype,
    scale_name,
    stored_format,
    wider,
)
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.ops.quant.codec import Format, Quantized, decode, scale_bytes

NATIVE = "native.json"


@runtime_checkable
class StateSource(Protocol):
    """Native tensors by name. `read` must be safe to call from several threads."""

    def names(self) -> Sequence[str]:
        """Every native name, once."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor, padding removed."""
        ...

    def dtype(self, name: str) -> str:
        """safetensors name of the dtype that `read` returns: F32, BF16 or F16."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor on the CPU, or rows [start, stop) of its first axis."""
        ...


class DictSource:
    """A state dict in memory."""

    def __init__(self, state: Mapping[str, Tensor]):
        self._state = state

    def names(self) -> Sequence[str]:
        """Keys of the dict."""
        return list(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> str:
        """Dtype of a tensor."""
        return DTYPE_NAMES[self._state[name].dtype]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor or rows of it, detached, on the CPU."""
        tensor = self._state[name].detach()
        return (tensor if rows is None else tensor[rows]).cpu()


class ReleasedSource:
    """A folder in the released layout as native tensors, decoded while reading. Decoding never rounds.

    A tensor has the wider of the config's dtype and its stored dtype, so nothing is lost; `dtype` overrides that (and
    may round). float32 parameters stay float32 (SPEC 19.3). Raises ValueError listing what does not fit the config.
    """

    def __init__(self, folder: SafetensorsFolder | Path | str, config: DSV41Config, dtype: str | None = None):
        self.folder = folder if isinstance(folder, SafetensorsFolder) else SafetensorsFolder(folder)
        self.config = config
        self._dtype = dtype
        refuse(self.folder.path, check_released(inventory_of(self.folder), config, self.folder.missing_names))
        self.bindings = {binding.native: binding for binding in bind(config)}

    def names(self) -> Sequence[str]:
        """Native names in the order of the table."""
        return list(self.bindings)

    def stored_names(self, binding: Binding) -> list[str]:
        """Stored tensors, scales included, that make up a native tensor."""
        scales = (scale_name(name) for name in binding.released)
        return [*binding.released, *(name for name in scales if self.folder.has(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        """Native shape."""
        return self.bindings[name].shape

    def dtype(self, name: str) -> str:
        """Dtype that `read` returns."""
        binding = self.bindings[name]
        if binding.is_float32:
            return "F32"
        if self._dtype:
            return self._dtype
        stored = (self.folder.info(part).dtype for part in binding.released)
        dtype = config_dtype(self.config.dtype)
        for one in set(stored):
            # bfloat16 holds every value of the quantized formats.
            dtype = wider(dtype, "BF16" if stored_format(one, binding.storage) else one)
        return dtype

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A native tensor, or rows of its first axis, reading no more of the files than those."""
        binding = self.bindings[name]
        wanted = row_range(binding.shape, rows)
        dtype = self.dtype(name)
        if not binding.via.lead:
            return read_stored(self.folder, binding.released[0], binding.storage, dtype, wanted)
        names = [binding.released[i] for i in binding.via.parts_of_rows(wanted)]
        return read_stacked(self.folder, names, binding, dtype)


class NativeSource:
    """A native folder (written by `import_checkpoint`), whether it holds plain or quantized tensors."""

    def __init__(self, path: Path | str, *, partial: bool = False):
        self.folder = SafetensorsFolder(path, partial=partial)
        self.config = DSV41Config.load(self.folder.path)
        self.record = NativeRecord.load(self.folder.path)
        bindings = bind(self.config)
        self.bindings = {binding.native: binding for binding in bindings}
        if not partial:
            shapes = {name: self.stored_shape(name) for name in self.bindings if name in self.folder.tensors}
            shapes |= {name: self.folder.info(name).shape for name in self.unknown_names()}
            refuse(self.folder.path, check_native(shapes, bindings))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Native shape of a tensor as the file has it, which the config may contradict."""
        shape, form = self.folder.info(name).shape, self._format(name)
        return (*shape[:-1], shape[-1] * 2) if form is not None and form.element == "e2m1" else shape

    def stored_names(self, binding: Binding) -> list[str]:
        """Stored tensors, scales included, that make up a native tensor."""
        absent = binding.native in self.folder.missing_names
        if absent or self._format(binding.native) is None:
            return [binding.native]
        return [binding.native, *map(scale_name, binding.released)]

    def unknown_names(self) -> list[str]:
        """Tensors that are neither native, nor kept scales, nor carried through."""
        return [name for name in self.folder.tensors if name not in self.bindings and not self._is_sidecar(name)]

    def _is_sidecar(self, name: str) -> bool:
        """Kept scales and carried-through tensors lie beside the native ones, under released names."""
        return is_carried(name) or name in self.record.kept_scales

    def names(self) -> Sequence[str]:
        """Native names in the order of the table."""
        return list(self.bindings)

    def shape(self, name: str) -> tuple[int, ...]:
        """Native shape."""
        return self.bindings[name].shape

    def dtype(self, name: str) -> str:
        """Dtype that `read` returns."""
        stored = self.folder.info(name).dtype
        return wider(config_dtype(self.config.dtype), "BF16") if self._format(name) else stored

    def _format(self, name: str) -> Format | None:
        return stored_format(self.folder.info(name).dtype, self.bindings[name].storage)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A native tensor, or rows of its first axis."""
        binding, form = self.bindings[name], self._format(name)
        wanted = row_range(binding.shape, rows)
        if form is None:
            return self.folder.read(name, wanted)
        dtype = self.dtype(name)
        if not binding.via.lead:
            scale = scale_name(binding.released[0])
            return _decode_rows(self.folder, name, scale, form, dtype, wanted)
        parts = binding.via.parts_of_rows(wanted)
        data = binding.via.to_released(self.folder.read(name, wanted))
        scales = [self.folder.read(scale_name(binding.released[i])) for i in parts]
        return binding.via.to_native(decode_all(name, data, scales, form, dtype))


@dataclasses.dataclass(frozen=True)
class NativeRecord:
    """`native.json`: what a native folder remembers of the checkpoint that it was imported from.

    shards: the source's files with every tensor's dtype and shape, in file order. index: its index file, verbatim.
    kept_scales: released names of the scales that lie in the native folder. hash_digest: of the Engram hash constants
    and token map (None: unknown tokenizer).
    """

    shards: tuple[Shard, ...]
    index: str | None
    kept_scales: frozenset[str]
    hash_digest: str | None = None

    def to_json(self) -> str:
        """The file's text."""
        shards = [
            {
                "file": shard.file,
                "metadata": shard.metadata,
                "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in shard.tensors],
            }
            for shard in self.shards
        ]
        content = {
            "format": "megatron_dsv41 native checkpoint",
            "version": 1,
            "hash_digest": self.hash_digest,
            "kept_scales": sorted(self.kept_scales),
            "source": {"shards": shards, "index": self.index},
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path) -> NativeRecord:
        """Read the record of a native folder; ValueError where there is none or it is of another version."""
        path = folder / NATIVE
        if not path.is_file():
            raise ValueError(
                f"{folder} is not a native checkpoint: it has no {NATIVE} (dsv41 convert import makes one)"
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}, this program reads version 1")
            shards = tuple(
                Shard(
                    shard["file"],
                    tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in shard["tensors"]),
                    shard["metadata"],
                )
                for shard in content["source"]["shards"]
            )
            kept = frozenset(content["kept_scales"])
            return cls(shards, content["source"]["index"], kept, content["hash_digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: corrupt: {error!r}") from error


def inventory_of(folder: SafetensorsFolder) -> Inventory:
    """Name -> (dtype, shape) of what a folder holds."""
    return {info.name: (info.dtype, info.shape) for info in folder.tensors.values()}


def is_native(path: Path | str) -> bool:
    """Whether a folder is a native checkpoint."""
    return (Path(path) / NATIVE).is_file()


def row_range(shape: tuple[int, ...], rows: slice | None) -> range:
    """A slice of the first axis as a range; ValueError where it leaves the axis or skips rows."""
    size = shape[0]
    if rows is None:
        return range(size)
    start, stop = rows.start or 0, size if rows.stop is None else rows.stop
    if rows.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise ValueError(f"rows {rows} of a tensor of shape {list(shape)}")
    return range(start, stop)


def read_stored(
    folder: SafetensorsFolder, name: str, storage: Storage, dtype: str, rows: range | None = None
) -> Tensor:
    """One released tensor, or rows of it, decoded to `dtype`."""
    info = folder.info(name)
    form = stored_format(info.dtype, storage)
    if form is None:
        return folder.read(name, rows).to(TORCH_DTYPES[dtype])
    return _decode_rows(folder, name, scale_name(name), form, dtype, range(info.shape[0]) if rows is None else rows)


def read_stacked(folder: SafetensorsFolder, names: Sequence[str], binding: Binding, dtype: str) -> Tensor:
    """Some parts of a stacked native tensor, decoded and stacked."""
    stored = {folder.info(name).dtype for name in names}
    form = stored_format(next(iter(stored)), binding.storage) if len(stored) == 1 else None
    if form is None:
        return binding.via.to_native([read_stored(folder, name, binding.storage, dtype) for name in names])
    data = [folder.read(name) for name in names]
    scales = [folder.read(scale_name(name)) for name in names]
    return binding.via.to_native(decode_all(f"{names[0]} to {names[-1]}", data, scales, form, dtype))


def decode_all(
    name: str, data: Sequence[Tensor], scales: Sequence[Tensor], form: Format, dtype: str
) -> Sequence[Tensor]:
    """Decode matrices of one shape; in one go where their blocks do not straddle matrices."""
    if data[0].shape[0] % form.block[0]:
        pairs = zip(data, scales, strict=True)
        return [_decode(name, Quantized(d, s, form.block, form.element), dtype) for d, s in pairs]
    try:
        bytes_ = torch.cat([scale_bytes(scale) for scale in scales])  # the scales' dtypes may differ
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    joined = Quantized(torch.cat(list(data)), bytes_, form.block, form.element)
    return list(torch.split(_decode(name, joined, dtype), data[0].shape[0]))


def _decode_rows(folder: SafetensorsFolder, name: str, scale: str, form: Format, dtype: str, rows: range) -> Tensor:
    """Decode some rows of a quantized matrix: whole row blocks are read, the wanted rows are cut out."""
    height = form.block[0]
    num_rows = folder.info(name).shape[0]
    blocks = range(rows.start // height, -(-rows.stop // height))
    read = range(blocks.start * height, min(blocks.stop * height, num_rows))
    quantized = Quantized(folder.read(name, read), folder.read(scale, blocks), form.block, form.element)
    values = _decode(name, quantized, dtype)
    return values[rows.start - read.start : rows.stop - read.start]


def _decode(name: str, quantized: Quantized, dtype: str) -> Tensor:
    try:
        return decode(quantized, TORCH_DTYPES[dtype])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
