"""From stored tensors to values: which codec, which scales, which bytes of both for the region asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.finite import require_finite
from megatron_dsv41.checkpoint.regions import Region, shifted, slices_of, whole
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES, Storage, scale_name, stored_format
from megatron_dsv41.ops.quant.codec import Format, Quantized, decode, scale_bytes


@dataclasses.dataclass(frozen=True)
class StoredReader:
    """Reads tensors of a folder under their released names, decoded. With `finite`, NaN and infinity are errors."""

    folder: SafetensorsFolder
    finite: bool = True

    def read(self, name: str, storage: Storage, dtype: str, region: Region) -> Tensor:
        """A region of one released tensor (in logical rows and columns), decoded to `dtype`."""
        form = stored_format(self.folder.info(name).dtype, storage)
        if form is None:
            return self.raw(name, *region).to(TORCH_DTYPES[dtype])
        return decode_region(
            lambda box: self.raw(name, *box),
            lambda blocks: self.raw(scale_name(name), *blocks),
            form,
            logical_shape(self.folder.info(name).shape, form),
            region,
            dtype,
            self.place(name),
        )

    def read_many(self, names: Sequence[str], storage: Storage, dtype: str, region: Region) -> Sequence[Tensor]:
        """The same region of tensors of one shape; whole quantized matrices are decoded in one go."""
        stored = {self.folder.info(name).dtype for name in names}
        form = stored_format(next(iter(stored)), storage) if len(stored) == 1 else None
        shape = self.folder.info(names[0]).shape
        if len(names) == 1 or form is None or region != whole(logical_shape(shape, form)):
            return [self.read(name, storage, dtype, region) for name in names]
        data, scales = [self.raw(name) for name in names], [self.raw(scale_name(name)) for name in names]
        return decode_all(f"{self.place(names[0])} to {names[-1]}", data, scales, form, dtype)

    def raw(self, name: str, *region: range) -> Tensor:
        """A region of a tensor as it is stored."""
        data = self.folder.read(name, *region)
        if self.finite:
            require_finite(data, self.folder.path / self.folder.info(name).file, name)
        return data

    def place(self, name: str) -> str:
        """File and tensor, for messages."""
        return f"{self.folder.path / self.folder.info(name).file}: {name}"


def logical_shape(stored: Sequence[int], form: Format) -> tuple[int, ...]:
    """Shape of the values of stored elements."""
    return (*stored[:-1], stored[-1] * 2) if form.element == "e2m1" else tuple(stored)


def decode_region(
    read_data: Callable[[Region], Tensor],
    read_scale: Callable[[Region], Tensor],
    form: Format,
    shape: Sequence[int],
    region: Region,
    dtype: str,
    place: str,
) -> Tensor:
    """A region of a quantized matrix of logical `shape`: whole blocks are read, the region is cut out."""
    blocks = tuple(range(axis.start // b, -(-axis.stop // b)) for axis, b in zip(region, form.block, strict=True))
    box = tuple(
        range(axis.start * b, min(axis.stop * b, size)) for axis, b, size in zip(blocks, form.block, shape, strict=True)
    )
    packed = 2 if form.element == "e2m1" else 1
    stored = (box[0], range(box[1].start // packed, -(-box[1].stop // packed)))
    quantized = Quantized(read_data(stored), read_scale(blocks), form.block, form.element)
    values = _decode(place, quantized, dtype)
    if box == region:
        return values
    return values[slices_of(shifted(region, [axis.start for axis in box]))].contiguous()


def decode_all(
    place: str, data: Sequence[Tensor], scales: Sequence[Tensor], form: Format, dtype: str
) -> Sequence[Tensor]:
    """Decode matrices of one shape; in one go where their blocks do not straddle matrices."""
    if data[0].shape[0] % form.block[0]:
        pairs = zip(data, scales, strict=True)
        return [_decode(place, Quantized(d, s, form.block, form.element), dtype) for d, s in pairs]
    try:
        bytes_ = torch.cat([scale_bytes(scale) for scale in scales])  # the scales' dtypes may differ
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    joined = Quantized(torch.cat(list(data)), bytes_, form.block, form.element)
    return list(torch.split(_decode(place, joined, dtype), data[0].shape[0]))


def _decode(place: str, quantized: Quantized, dtype: str) -> Tensor:
    try:
        return decode(quantized, TORCH_DTYPES[dtype])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
