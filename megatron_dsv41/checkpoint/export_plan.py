"""What an export writes: dtype and place of every released tensor, and the units of work that make them."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.finite import num_non_finite
from megatron_dsv41.checkpoint.jobs import Unit
from megatron_dsv41.checkpoint.lora import MergedSource
from megatron_dsv41.checkpoint.mapping import (
    Binding,
    Inventory,
    bind,
    carried_tensors,
    is_carried,
    release_shards,
    released_inventory,
)
from megatron_dsv41.checkpoint.native_record import NativeRecord, is_native
from megatron_dsv41.checkpoint.pieces import (
    binding_pieces,
    copy_range_units,
    copy_units,
    num_elements,
    row_pieces,
)
from megatron_dsv41.checkpoint.regions import whole
from megatron_dsv41.checkpoint.safetensors_io import (
    SafetensorsFolder,
    Shard,
    ShardWriter,
    TensorSpec,
    shards_by_file,
    shards_by_size,
)
from megatron_dsv41.checkpoint.sources import NativeSource, StateSource
from megatron_dsv41.checkpoint.storage import (
    QUANTIZED,
    TORCH_DTYPES,
    Storage,
    format_dtype,
    num_bytes,
    scale_name,
    stored_format,
    weight_name,
)
from megatron_dsv41.checkpoint.stored import StoredReader, logical_shape
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.ops.quant.codec import Format, Quantized, encode, scale_as, scale_bytes

SHARD_BYTES = 5 * 10**9

ExportStorage = Literal["source", "bf16", "fp32", "released"]
ShardPlan = Literal["source", "release"] | int


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a checkpoint came from: kept scales and carried-through tensors (released names), and the source's files."""

    folder: SafetensorsFolder
    config: DSV41Config
    shards: tuple[Shard, ...]
    index: str | None

    @classmethod
    def load(cls, path: Path | str) -> Origin:
        """From a native folder or a released one."""
        folder = SafetensorsFolder(path)
        config = DSV41Config.load(path)
        if is_native(path):
            record = NativeRecord.load(folder.path)
            return cls(folder, config, record.shards, record.index)
        return cls(folder, config, folder.shards(), folder.index_text)

    @functools.cached_property
    def inventory(self) -> Inventory:
        """Released name -> (dtype, shape) of the source."""
        return {spec.name: (spec.dtype, spec.shape) for shard in self.shards for spec in shard.tensors}

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Released name -> the source's file."""
        return {spec.name: shard.file for shard in self.shards for spec in shard.tensors}

    def kept_scale(self, weight: str, form: Format, blocks: range) -> Tensor | None:
        """Rows of the scales that a tensor had, where it was stored in this format."""
        dtype, _ = self.inventory.get(weight, ("", ()))
        scale = scale_name(weight)
        if dtype != format_dtype(form) or scale not in self.folder.tensors:
            return None
        return self.folder.read(scale, blocks)


class ExportPlan:
    """An export, decided: `specs`, `shards` and `units` follow from source, origin and wished storage.

    storage None: as the config says (quantized in the released layout if it has a quantization_config, else plain).
    plain: patterns of released names (`layers.*.attn.*`) to be stored in bfloat16 instead of quantized. finite: NaN and
    infinity are errors of the units.
    """

    def __init__(
        self,
        source: StateSource,
        config: DSV41Config,
        origin: Origin | None,
        storage: ExportStorage | None,
        plain: Sequence[str] = (),
        finite: bool = True,
    ):
        if storage == "source" and origin is None:
            raise ValueError(
                "storage 'source' needs to know where the model came from: give `like`, or another storage"
            )
        self.source = source
        self.origin = origin
        self.storage = storage
        self.finite = finite
        self.config = _exported_config(_like_origin(config, origin, storage) if origin else config, storage, plain)
        self.bindings = bind(config)
        self._carried = [n for n in origin.folder.tensors if is_carried(n)] if origin else []
        self._carried_storage = {name: storage for name, (_, storage) in carried_tensors(config).items()}
        wanted = origin.inventory if origin and storage == "source" else released_inventory(self.config)
        self._wanted = self._unquantize(wanted, plain)
        missing = [name for b in self.bindings for name in b.released if name not in self._wanted]
        if missing:
            raise ValueError(
                f"the origin {origin.folder.path if origin else ''} has no {missing[0]} ({len(missing)} such tensors): "
                "it is another model; choose another `like` or another storage"
            )

    def _unquantize(self, wanted: Inventory, patterns: Sequence[str]) -> Inventory:
        """The inventory with matching weights in bfloat16; a pattern that matches none is a ValueError."""
        if not patterns:
            return wanted
        shapes = {name: binding.part_shape for binding in self.bindings for name in binding.released}
        shapes |= {name: shape for name, (shape, _) in carried_tensors(self.config).items()}
        result = dict(wanted)
        for pattern in patterns:
            names = [n for n in fnmatch.filter(shapes, pattern) if n in wanted and wanted[n][0] in QUANTIZED]
            if not names:
                raise ValueError(f"plain: no quantized tensor matches {pattern!r} (patterns are of released names)")
            result |= {name: ("BF16", shapes[name]) for name in names}
        return result

    @functools.cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor to be written, in the order of the table, carried-through parts last."""
        specs: list[TensorSpec] = []
        for binding in self.bindings:
            for name in binding.released:
                specs += self._specs_of(name, binding.part_shape, self._wanted[name][0], binding.storage)
        for name in self._carried:
            specs += self._carried_specs(name)
        return tuple(specs)

    def shards(self, plan: ShardPlan | None) -> list[Shard]:
        """Division into files: the origin's, the release's roles, or a maximal number of bytes (default 5 GB).

        Without a wish it is the origin's when the storage is.
        """
        plan = plan or ("source" if self.storage == "source" else SHARD_BYTES)
        if plan == "release":
            return shards_by_file(
                self.specs, release_shards(self.config, {s.name: (s.dtype, s.shape) for s in self.specs})
            )
        if plan != "source":
            return shards_by_size(self.specs, int(plan))
        if self.origin is None:
            raise ValueError("shards 'source' needs to know where the model came from: give `like`, or a size")
        if {spec.name for spec in self.specs} == set(self.origin.inventory) and self.storage == "source":
            return list(self.origin.shards)
        files = self.origin.files
        return shards_by_file(self.specs, {s.name: files.get(s.name) or files[weight_name(s.name)] for s in self.specs})

    def units(self) -> tuple[list[Unit], int]:
        """The work, and the elements of its largest piece."""
        units: list[Unit] = []
        largest = 0
        for binding in self.bindings:
            if self._copies(binding):
                units += self._copy_native(binding)
                continue
            for rows in binding_pieces(binding):
                units.append(self._unit(binding, rows))
                largest = max(largest, num_elements(binding.shape, rows))
        for name in self._carried:
            units += self._carried_units(name)
        return units, largest

    def identity(self) -> Any:
        """JSON value that two runs share when they write the same bytes; None for sources that cannot promise that."""
        source = self.source.identity()
        origin = self.origin.folder.fingerprint() if self.origin else None
        names = [[spec.name, spec.dtype] for spec in self.specs]
        return source and ["export", source, origin, names, self.config.to_hf(), self.finite]

    def _specs_of(self, name: str, shape: tuple[int, ...], dtype: str, storage: Storage) -> Iterator[TensorSpec]:
        form = stored_format(dtype, storage)
        if form is None:
            yield TensorSpec(name, dtype, shape)
        else:
            scale = scale_name(name)
            yield TensorSpec(name, dtype, form.data_shape(shape))
            yield TensorSpec(scale, self._wanted[scale][0], form.scale_shape(shape))

    def _unit(self, binding: Binding, rows: slice) -> Unit:
        """Read rows of the native tensor, write them to its released parts."""
        first_row = 0 if binding.via.lead else rows.start
        lead = (range(rows.start, rows.stop), *whole(binding.via.lead[1:])) if binding.via.lead else ()
        names = [binding.released[i] for i in binding.via.parts_of(lead)]
        height = binding.part_shape[0] if binding.via.lead else rows.stop - rows.start
        bytes_ = sum(num_bytes(self._wanted[n][0], (height, *self._wanted[n][1][1:])) for n in names)

        def run(writer: ShardWriter) -> None:
            native = self.source.read(binding.native, rows)
            self._write_parts(writer, names, binding.storage, first_row, binding.via.to_released(native))

        return Unit(bytes_, run, names[0])

    def _write_parts(
        self, writer: ShardWriter, names: Sequence[str], storage: Storage, first_row: int, parts: Sequence[Tensor]
    ) -> None:
        """Write rows of released tensors of one shape, encoded in one go where blocks do not straddle tensors."""
        dtypes = {self._wanted[name][0] for name in names}
        form = stored_format(self._wanted[names[0]][0], storage)
        rows = parts[0].shape[0]
        together = form is not None and len(dtypes) == 1 and rows % form.block[0] == 0
        if len(names) == 1 or form is None or not together:
            for name, part in zip(names, parts, strict=True):
                self._write(writer, name, storage, first_row, part)
            return
        height = rows // form.block[0]
        kept = [self._kept_scale(name, form, range(height)) for name in names]
        known = [scale_bytes(scale) for scale in kept if scale is not None]
        scales = torch.cat(known) if len(known) == len(names) else None
        quantized = self._encode(names[0], first_row, torch.cat(list(parts)), form, scales)
        for i, name in enumerate(names):
            writer.write_rows(name, 0, quantized.data[i * rows : (i + 1) * rows])
            self._write_scale(writer, name, 0, quantized.scale[i * height : (i + 1) * height])

    def _write(self, writer: ShardWriter, name: str, storage: Storage, first_row: int, values: Tensor) -> None:
        dtype = self._wanted[name][0]
        form = stored_format(dtype, storage)
        if form is None:
            number = num_non_finite(values) if self.finite else 0
            if number:
                raise ValueError(f"{name} (rows from {first_row}): {number} values are NaN or infinite")
            writer.write_rows(name, first_row, values.to(TORCH_DTYPES[dtype]))
            return
        first_block = first_row // form.block[0]
        blocks = range(first_block, first_block + form.scale_shape(tuple(values.shape))[0])
        quantized = self._encode(name, first_row, values, form, self._kept_scale(name, form, blocks))
        writer.write_rows(name, first_row, quantized.data)
        self._write_scale(writer, name, first_block, quantized.scale)

    def _encode(self, name: str, first_row: int, values: Tensor, form: Format, kept: Tensor | None) -> Quantized:
        try:
            return encode(values, form, kept)
        except ValueError as error:
            raise ValueError(f"{name} (rows from {first_row}): {error}") from error

    def _kept_scale(self, name: str, form: Format, blocks: range) -> Tensor | None:
        return self.origin.kept_scale(name, form, blocks) if self.origin else None

    def _write_scale(self, writer: ShardWriter, weight: str, first_block: int, scale: Tensor) -> None:
        name = scale_name(weight)
        dtype = TORCH_DTYPES[writer.spec(name).dtype]
        writer.write_rows(name, first_block, scale_as(scale.view(torch.uint8), dtype))

    def _native_folder(self, binding: Binding) -> SafetensorsFolder | None:
        """The native folder that holds a tensor as it is to be exported, if any."""
        source = self.source
        if isinstance(source, MergedSource) and not source.touches(binding.native):
            source = source.base
        return source.folder if isinstance(source, NativeSource) else None

    def _copies(self, binding: Binding) -> bool:
        """Whether the bytes of a native folder are the released bytes."""
        folder = self._native_folder(binding)
        if folder is None:
            return False
        stored = folder.info(binding.native).dtype
        if any(self._wanted[name][0] != stored for name in binding.released):
            return False
        return stored not in QUANTIZED or bool(self.origin and self.origin.folder.path == folder.path)

    def _copy_native(self, binding: Binding) -> Iterator[Unit]:
        folder = self._native_folder(binding)
        assert folder
        info = folder.info(binding.native)
        size = info.num_bytes // len(binding.released)
        for i, name in enumerate(binding.released):
            yield from copy_range_units(folder, binding.native, i * size, (i + 1) * size, name, finite=self.finite)
            if info.dtype in QUANTIZED:
                yield from copy_units(folder, scale_name(name), scale_name(name), finite=self.finite)

    def _carried_form(self, name: str) -> Format | None:
        """The codec of a carried-through tensor as it is stored now."""
        assert self.origin
        return stored_format(self.origin.folder.info(name).dtype, self._carried_storage.get(name, Storage.PLAIN))

    def _carried_target(self, name: str) -> str:
        """dtype in which a carried-through weight is written."""
        assert self.origin
        stored = self.origin.folder.info(name).dtype
        if name not in self._carried_storage or name not in self._wanted:
            decoded = {"bf16": "BF16", "fp32": "F32"}.get(self.storage or "", stored)
            return decoded if stored in QUANTIZED else stored
        return self._wanted[name][0]

    def _is_carried_scale(self, name: str) -> bool:
        assert self.origin
        return name.endswith(".scale") and weight_name(name) in self.origin.folder.tensors

    def _carried_specs(self, name: str) -> Iterator[TensorSpec]:
        assert self.origin
        if self._is_carried_scale(name):
            return  # comes with its weight, if at all
        info, form, target = self.origin.folder.info(name), self._carried_form(name), self._carried_target(name)
        shape = info.shape if form is None else logical_shape(info.shape, form)
        if target == info.dtype and form is not None:
            scale = self.origin.folder.info(scale_name(name))
            yield TensorSpec(name, info.dtype, info.shape)
            yield TensorSpec(scale.name, scale.dtype, scale.shape)
        else:
            yield from self._specs_of(name, shape, target, self._carried_storage.get(name, Storage.PLAIN))

    def _carried_units(self, name: str) -> Iterator[Unit]:
        assert self.origin
        folder = self.origin.folder
        if self._is_carried_scale(name):
            return
        info, form, target = folder.info(name), self._carried_form(name), self._carried_target(name)
        if target == info.dtype:
            yield from copy_units(folder, name, name, finite=self.finite)
            if form is not None:
                yield from copy_units(folder, scale_name(name), scale_name(name), finite=self.finite)
            return
        storage = self._carried_storage.get(name, Storage.PLAIN)
        shape = info.shape if form is None else logical_shape(info.shape, form)
        stored = StoredReader(folder, self.finite)
        plain = "F32" if info.dtype == "F32" or target == "F32" else "BF16"

        def unit(rows: slice) -> Unit:
            def run(writer: ShardWriter) -> None:
                region = (range(rows.start, rows.stop), *whole(shape[1:]))
                self._write(writer, name, storage, rows.start, stored.read(name, storage, plain, region))

            return Unit(num_elements(info.shape, rows) * 2, run, name)

        yield from (unit(rows) for rows in row_pieces(info.shape, stacked=False))


def _like_origin(config: DSV41Config, origin: Origin, storage: ExportStorage | None) -> DSV41Config:
    """A run's config with what its weights have from their origin: storage, where that is kept, drafts and vision."""
    named = ("vision", "num_nextn_predict_layers") if any(is_carried(name) for name in origin.folder.tensors) else ()
    named += ("dtype", "quantization") if storage == "source" else ()
    fields = [field.name for field in dataclasses.fields(config)]
    taken = [name for name in fields if name in named or (name.startswith("dspark_") and "vision" in named)]
    config = dataclasses.replace(config, **{name: getattr(origin.config, name) for name in taken})
    spelled = ("source", "rope_key")  # how the file says it
    same = all(getattr(config, name) == getattr(origin.config, name) for name in fields if name not in spelled)
    return origin.config if same else config


def _exported_config(config: DSV41Config, storage: ExportStorage | None, plain: Sequence[str]) -> DSV41Config:
    """The config that describes the exported storage."""
    if storage in ("bf16", "fp32"):
        if plain:
            raise ValueError(f"plain patterns have no meaning with storage {storage!r}, which quantizes nothing")
        dtype = "bfloat16" if storage == "bf16" else "float32"
        return dataclasses.replace(config, quantization=None, dtype=dtype)
    if storage == "released" and config.quantization is None:
        config = dataclasses.replace(config, quantization=presets.flash().quantization)
    if plain and config.quantization is not None:
        quantization = dict(config.quantization) | {"modules_to_not_convert": list(plain)}
        config = dataclasses.replace(config, quantization=quantization)
    return config
