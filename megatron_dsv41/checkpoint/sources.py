"""Where native tensors come from: a released folder, a native folder, tensors in memory, or a backend's checkpoint.

Everything that loads or exports a model goes through `StateSource`, so a distributed checkpoint is exported, and a
distributed model started from a released folder, by the same code: each reader asks for the region it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from megatron_dsv41.checkpoint.inventory import check_native, check_released, refuse
from megatron_dsv41.checkpoint.mapping import Binding, Inventory, bind, is_carried
from megatron_dsv41.checkpoint.native_record import NativeRecord
from megatron_dsv41.checkpoint.regions import region_of, shape_of, whole
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder
from megatron_dsv41.checkpoint.storage import DTYPE_NAMES, config_dtype, scale_name, stored_format, wider
from megatron_dsv41.checkpoint.stored import StoredReader, decode_all, decode_region, logical_shape
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.ops.quant.codec import Format


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

    def read(self, name: str, *cut: slice) -> Tensor:
        """The tensor on the CPU, or [start, stop) of its first axes: rows, columns, and so on."""
        ...

    def identity(self) -> Any:
        """A JSON value that changes when the content does; None where that cannot be promised."""
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

    def read(self, name: str, *cut: slice) -> Tensor:
        """A tensor or a part of it, detached, on the CPU."""
        return self._state[name].detach()[cut].cpu()

    def identity(self) -> Any:
        """Nothing that outlives the process."""
        return None


class ReleasedSource:
    """A folder in the released layout as native tensors, decoded while reading. Decoding never rounds.

    A tensor has the wider of the config's dtype and its stored dtype, so nothing is lost; `dtype` overrides that (and
    may round). float32 parameters stay float32 (SPEC 19.3). Raises ValueError listing what does not fit the config,
    and where `finite`, naming file and tensor for NaN and infinity in what is read.
    """

    def __init__(
        self,
        folder: SafetensorsFolder | Path | str,
        config: DSV41Config,
        dtype: str | None = None,
        finite: bool = True,
    ):
        self.folder = folder if isinstance(folder, SafetensorsFolder) else SafetensorsFolder(folder)
        self.config = config
        self._dtype = dtype
        self.finite = finite
        self._stored = StoredReader(self.folder, finite)
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

    def read(self, name: str, *cut: slice) -> Tensor:
        """A native tensor, or a region of it, reading no more of the files than that and the rest of its blocks."""
        binding = self.bindings[name]
        region = region_of(binding.shape, cut)
        lead, part = region[: len(binding.via.lead)], region[len(binding.via.lead) :]
        names = [binding.released[i] for i in binding.via.parts_of(lead)]
        parts = self._stored.read_many(names, binding.storage, self.dtype(name), part)
        return binding.via.to_native(parts, shape_of(lead))

    def identity(self) -> Any:
        """Place, sizes and times of the files."""
        return self.folder.fingerprint()


class NativeSource:
    """A native folder (written by `import_checkpoint`), whether it holds plain or quantized tensors."""

    def __init__(self, path: Path | str, *, partial: bool = False):
        self.folder = SafetensorsFolder(path, partial=partial)
        self.config = DSV41Config.load(self.folder.path)
        self.record = NativeRecord.load(self.folder.path)
        self._stored = StoredReader(self.folder, finite=False)
        bindings = bind(self.config)
        self.bindings = {binding.native: binding for binding in bindings}
        if not partial:
            shapes = {name: self.stored_shape(name) for name in self.bindings if name in self.folder.tensors}
            shapes |= {name: self.folder.info(name).shape for name in self.unknown_names()}
            refuse(self.folder.path, check_native(shapes, bindings))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Native shape of a tensor as the file has it, which the config may contradict."""
        shape, form = self.folder.info(name).shape, self._format(name)
        return shape if form is None else logical_shape(shape, form)

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

    def read(self, name: str, *cut: slice) -> Tensor:
        """A native tensor, or a region of it."""
        binding, form = self.bindings[name], self._format(name)
        region = region_of(binding.shape, cut)
        if form is None:
            return self.folder.read(name, *region)
        lead, part = region[: len(binding.via.lead)], region[len(binding.via.lead) :]
        scales = [scale_name(binding.released[i]) for i in binding.via.parts_of(lead)]
        dtype, place = self.dtype(name), self._stored.place(name)
        if lead and part == whole(binding.part_shape):
            data = binding.via.to_released(self.folder.read(name, *lead))
            parts = decode_all(place, data, [self.folder.read(scale) for scale in scales], form, dtype)
            return binding.via.to_native(parts, shape_of(lead))
        parts: Sequence[Tensor] = [
            decode_region(
                lambda box, one=one: self.folder.read(name, *one, *box).flatten(0, -2),
                lambda blocks, scale=scale: self.folder.read(scale, *blocks),
                form,
                binding.part_shape,
                part,
                dtype,
                place,
            )
            for one, scale in zip(binding.via.singles(lead), scales, strict=True)
        ]
        return binding.via.to_native(parts, shape_of(lead))

    def identity(self) -> Any:
        """Place, sizes and times of the files."""
        return self.folder.fingerprint()


def inventory_of(folder: SafetensorsFolder) -> Inventory:
    """Name -> (dtype, shape) of what a folder holds."""
    return {info.name: (info.dtype, info.shape) for info in folder.tensors.values()}
