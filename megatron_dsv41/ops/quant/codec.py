"""How the release stores quantized weights: E4M3 or packed E2M1 elements, E8M0 block scales (SPEC 18, 19).

`decode` is exact or an error. `encode` follows the published rule, per block: scale 2^ceil(log2(amax /
largest)), then round to nearest even. The rule leaves two things open, decided here: a block of zeros gets
the scale 1, and there is no floor under amax (the activation formats have one; a weight block keeps its full
precision however small). Several scales can hold the same values, so `encode` accepts the scales that a
checkpoint came with and keeps them in every block whose values have not changed: that is what makes import ->
export return the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from megatron_dsv41.ops.quant.ref import E2M1_MAX, E4M3_MAX

E8M0_BIAS = 127
E8M0_NAN = 255
BLOCK_ELEMENTS = 2**18  # worked on at a time


@dataclasses.dataclass(frozen=True)
class Format:
    """Element format and scale block (rows, columns) of one quantized layout."""

    element: Literal["e4m3", "e2m1"]
    block: tuple[int, int]

    @property
    def largest(self) -> float:
        """Largest magnitude of an element."""
        return E4M3_MAX if self.element == "e4m3" else E2M1_MAX

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Stored shape of the elements of a logical [rows, columns]: E2M1 packs two columns a byte."""
        rows, columns = shape
        if self.element == "e4m3":
            return rows, columns
        if columns % 2:
            raise ValueError(f"packed FP4 needs an even number of columns, got {columns}")
        return rows, columns // 2

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a logical [rows, columns]; partial blocks count."""
        return tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))


FP8_BLOCK32 = Format("e4m3", (32, 32))
FP8_ROW32 = Format("e4m3", (1, 32))
FP4_ROW32 = Format("e2m1", (1, 32))


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix. `dtype` is its element format.

    data: float8_e4m3fn [rows, columns], or int8 [rows, columns / 2] with the even column in the low nibble.
    scale: E8M0 [ceil(rows / block[0]), ceil(columns / block[1])] as float8_e8m0fnu, as its bytes (uint8) or
    as powers of two (float32). The value of an element is data * scale.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: Literal["e4m3", "e2m1"]

    @property
    def format(self) -> Format:
        """Element format and block as one value."""
        return Format(self.dtype, self.block)

    @property
    def shape(self) -> tuple[int, int]:
        """Logical [rows, columns]."""
        rows, columns = self.data.shape
        return rows, columns * 2 if self.dtype == "e2m1" else columns


def scale_bytes(scale: Tensor) -> Tensor:
    """E8M0 bytes (uint8, byte b means 2^(b - 127)) of scales in any of their three dtypes.

    ValueError for NaN scales, for float32 scales that are no power of two in E8M0's range, and for other
    dtypes.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    elif scale.dtype == torch.float32:
        scale = _bytes_of_powers(scale)
    elif scale.dtype != torch.uint8:
        raise ValueError(f"block scales must be E8M0 (uint8 or float8_e8m0fnu) or float32, got {scale.dtype}")
    num_nan = int((scale == E8M0_NAN).sum())
    if num_nan:
        raise ValueError(f"{num_nan} of {scale.numel()} block scales are NaN")
    return scale


def scale_as(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 bytes in the dtype that a file uses for scales: uint8, float8_e8m0fnu or float32."""
    if dtype == torch.float32:
        return powers_of_two(bytes_, torch.float32)
    return bytes_.view(dtype)


def powers_of_two(bytes_: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127), exact in float32 or bfloat16 (2^-127 is subnormal in both)."""
    bits = bytes_.to(torch.int32) << 23
    values = torch.where(bits == 0, 1 << 22, bits).view(torch.float32)
    return values.to(dtype)


def decode(quantized: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values [rows, columns] in `dtype` (bfloat16 or float32), without rounding.

    ValueError where that is impossible: data of another dtype or shape than the format's, NaN scales, values
    outside the range of `dtype` (only with scales near the ends of E8M0).
    """
    form, shape = quantized.format, quantized.shape
    want = torch.float8_e4m3fn if form.element == "e4m3" else torch.int8
    if quantized.data.dtype != want:
        raise ValueError(f"{form.element} data must be {want}, got {quantized.data.dtype}")
    if tuple(quantized.scale.shape) != form.scale_shape(shape):
        raise ValueError(
            f"scales of a {list(shape)} matrix in blocks of {list(form.block)} must have shape "
            f"{list(form.scale_shape(shape))}, got {list(quantized.scale.shape)}"
        )
    bytes_ = scale_bytes(quantized.scale)
    values = torch.empty(shape, dtype=dtype)
    for rows, blocks in _row_blocks(shape, form):
        _decode_rows(quantized.data[rows], bytes_[blocks], form, values[rows])
        if _near_the_ends(bytes_[blocks], form):
            scale = powers_of_two(bytes_[blocks], torch.float32).double()
            exact = _scaled(_lookup(quantized.data[rows], form, torch.float32).double(), scale, form)
            wrong = int(((exact != values[rows].double()) & ~exact.isnan()).sum())
            if wrong:
                raise ValueError(f"{wrong} values (scale times element) are outside the range of {dtype}")
    return values


def encode(
    x: Tensor, form: Format, kept: Tensor | None = None, scale_dtype: torch.dtype = torch.float8_e8m0fnu
) -> Quantized:
    """Quantize x [rows, columns] (bfloat16 or float32). Rows and columns need not be multiples of the block.

    kept: scales that the matrix had in its checkpoint, any scale dtype. A block whose values they hold bit
    for bit keeps its scale, and thereby its bytes; every other block gets a new one. Scales come back in
    `scale_dtype`. ValueError for non-finite values.
    """
    rows, columns = x.shape
    shape = (rows, columns)
    form.data_shape(shape)
    if kept is not None and tuple(kept.shape) != form.scale_shape(shape):
        raise ValueError(f"kept scales have shape {list(kept.shape)}, expected {list(form.scale_shape(shape))}")
    kept_bytes = None if kept is None else scale_bytes(kept)
    data = torch.empty(form.data_shape(shape), dtype=torch.uint8)
    bytes_ = torch.empty(form.scale_shape(shape), dtype=torch.uint8)
    for rows, blocks in _row_blocks(shape, form):
        tiles = _tiles(x[rows].to(torch.float32), form)
        codes, bytes_[blocks] = _quantize(tiles, form, None if kept_bytes is None else kept_bytes[blocks])
        codes = codes.flatten(2, 3).flatten(0, 1)[: rows.stop - rows.start, :columns]
        data[rows] = codes if form.element == "e4m3" else _pack(codes)
    element = torch.float8_e4m3fn if form.element == "e4m3" else torch.int8
    return Quantized(data.view(element), scale_as(bytes_, scale_dtype), form.block, form.element)


def _row_blocks(shape: tuple[int, ...], form: Format) -> Iterator[tuple[slice, slice]]:
    """Rows, and rows of scales, of pieces that stay in a processor's cache: ten times as fast as whole matrices."""
    height = form.block[0]
    count = max(1, BLOCK_ELEMENTS // max(shape[1] * height, 1))
    for block in range(0, -(-shape[0] // height) if shape[1] else 0, count):
        stop = min((block + count) * height, shape[0])
        yield slice(block * height, stop), slice(block, -(-stop // height))


def _quantize(tiles: Tensor, form: Format, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Element codes (uint8, the shape of `tiles`) and scale bytes: the kept ones where they hold the values bit for
    bit, the rule elsewhere.
    """
    if kept is not None:
        rounded, held = _round(tiles, kept, form)
        held *= powers_of_two(kept, torch.float32)[:, None, :, None]
        if torch.equal(held.view(torch.int32), tiles.view(torch.int32)):
            return _codes(rounded, form), kept
        unchanged = (held.view(torch.int32) == tiles.view(torch.int32)).all(3).all(1)
        bytes_ = torch.where(unchanged, kept, _rule(tiles, form))
    else:
        bytes_ = _rule(tiles, form)
    return _codes(_round(tiles, bytes_, form)[0], form), bytes_


def _bytes_of_powers(scale: Tensor) -> Tensor:
    bits = scale.contiguous().view(torch.int32)
    bytes_ = torch.where(bits == 1 << 22, 0, bits >> 23)
    normal = (bits & 0x7FFFFF == 0) & (bytes_ > 0) & (bytes_ < E8M0_NAN)
    nan = scale.isnan()
    wrong = int((~(normal | (bits == 1 << 22) | nan)).sum())
    if wrong:
        raise ValueError(
            f"{wrong} of {scale.numel()} float32 block scales are not powers of two "
            f"(from {float(scale.min())} to {float(scale.max())}): E8M0 bytes copied as numbers, or another format"
        )
    return torch.where(nan, E8M0_NAN, bytes_).to(torch.uint8)


def _rule(tiles: Tensor, form: Format) -> Tensor:
    """E8M0 bytes of 2^ceil(log2(amax / largest)), from the bit pattern of amax times the fp32 reciprocal."""
    amax = tiles.abs().amax((1, 3))
    if not bool(amax.isfinite().all()):
        raise ValueError("cannot quantize a matrix with non-finite values")
    bits = (amax * torch.tensor(1 / form.largest, dtype=torch.float32)).view(torch.int32)
    bytes_ = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return torch.where(amax == 0, E8M0_BIAS, bytes_).to(torch.uint8)


def _near_the_ends(bytes_: Tensor, form: Format) -> bool:
    """Whether some product may leave bfloat16: subnormal at the lower end, infinite at the upper."""
    low, high = (6, 246) if form.element == "e4m3" else (0, 252)
    return int(bytes_.min()) < low or int(bytes_.max()) > high


def _tiles(x: Tensor, form: Format) -> Tensor:
    """[rows, columns] as [row blocks, block rows, column blocks, block columns], padded with zeros."""
    (rows, columns), (height, width) = x.shape, form.block
    if rows % height or columns % width:
        x = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    return x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)


def _scaled(elements: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Elements [rows, columns] times the scale of their block."""
    rows, columns = elements.shape
    tiles = _tiles(elements, form)
    tiles *= scale[:, None, :, None]
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _decode_rows(data: Tensor, bytes_: Tensor, form: Format, out: Tensor) -> None:
    """Look up every pair of scale byte and stored byte: one pass over the data, no arithmetic on values."""
    rows, columns = data.shape
    table = _products(form.element, out.dtype)
    index = _tiles(data.contiguous().view(torch.uint8).int(), dataclasses.replace(form, block=_stored_block(form)))
    index += (bytes_.int() << 8)[:, None, :, None]
    found = out.view(table.dtype)
    if index.numel() == rows * columns:
        torch.index_select(table, 0, index.flatten(), out=found.view(-1))
        return
    whole = table.index_select(0, index.flatten()).view(-1, index.shape[2] * index.shape[3])
    found.copy_(whole[:rows, :columns])


def _stored_block(form: Format) -> tuple[int, int]:
    """The block in stored bytes."""
    return (form.block[0], form.block[1] // 2) if form.element == "e2m1" else form.block


def _round(tiles: Tensor, bytes_: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """fp32 tiles over their scales, rounded: what `_codes` takes, and the element values in fp32."""
    # Division by a power of two as a product: 2^(127 - byte), the reciprocal of 2^(byte - 127), is exact.
    x = tiles * powers_of_two(254 - bytes_, torch.float32)[:, None, :, None]
    x.clamp_(-form.largest, form.largest)
    if form.element == "e4m3":
        elements = x.to(torch.float8_e4m3fn).view(torch.uint8)
        return elements, _lookup(elements.flatten(1), form, torch.float32).view(x.shape)
    # The grid has steps of 1/2 below 2, of 1 below 4, of 2 up to 6: half the power of two at or below |x|, and at least
    # 1/2. Adding 1.5 * 2^23 steps leaves no bits for less than a step, so the addition rounds, ties to the even code.
    magic = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(1.0).mul_(0.5 * 1.5 * 2**23)
    rounded = x.abs().add_(magic).sub_(magic).copysign_(x)
    return rounded, rounded.clone()


def _codes(rounded: Tensor, form: Format) -> Tensor:
    """uint8 element codes of what `_round` gave: E4M3 bytes, or E2M1 codes with the sign in bit 3."""
    if form.element == "e4m3":
        return rounded
    halves = (rounded.abs() * 2).to(torch.uint8)  # 0 1 2 3 4 6 8 12 for the codes 0 to 7
    code = halves.clamp(max=4) + ((halves.clamp(4, 8) - 4) >> 1) + ((halves.clamp(min=8) - 8) >> 2)
    return code | ((rounded.view(torch.int32) >> 28).to(torch.uint8) & 8)


def _pack(codes: Tensor) -> Tensor:
    """uint8 codes [rows, columns] -> uint8 [rows, columns / 2], even columns in the low nibbles."""
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _lookup(data: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Element values [rows, columns] of stored elements in bfloat16 or float32."""
    index = data.contiguous().view(torch.uint8).flatten().int()
    return _table(form.element, dtype).index_select(0, index).view(dtype).reshape(data.shape[0], -1)


@functools.cache
def _products(element: str, dtype: torch.dtype) -> Tensor:
    """[256 * 256] the values of scale byte * 256 + stored byte, as integers of the same bits like `_table`."""
    values = _table(element, dtype).view(256, -1).view(dtype)
    scale = powers_of_two(torch.arange(256, dtype=torch.int32).to(torch.uint8), dtype)
    return (values[None] * scale[:, None, None]).view(_table(element, dtype).dtype).flatten()


@functools.cache
def _table(element: str, dtype: torch.dtype) -> Tensor:
    """The value of each byte as an integer of the same bits; for E2M1 the two values side by side in memory order."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if element == "e4m3":
        return byte.view(torch.float8_e4m3fn).to(dtype).view(integers[dtype.itemsize])
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([positive, -positive])
    pairs = torch.stack([values[(byte & 15).int()], values[(byte >> 4).int()]], dim=1)
    return pairs.to(dtype).view(integers[2 * dtype.itemsize]).flatten()
