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
from typing import Literal

import torch
from torch import Tensor

from megatron_dsv41.ops.quant.ref import E2M1_MAX, E4M3_MAX

E8M0_BIAS = 127
E8M0_NAN = 255


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
    if not quantized.data.numel():
        return torch.zeros(shape, dtype=dtype)
    bytes_ = scale_bytes(quantized.scale)
    elements = quantized.data if form.element == "e4m3" else _unpack(quantized.data)
    values = _scaled(elements.to(dtype), powers_of_two(bytes_, dtype), form.block)
    if _near_the_ends(bytes_, form):
        exact = _scaled(elements.to(torch.float64), powers_of_two(bytes_, torch.float64), form.block)
        wrong = int(((exact != values.to(torch.float64)) & ~exact.isnan()).sum())
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
    tiles = _tiles(x.to(torch.float32), form.block)
    if not bool(tiles.isfinite().all()):
        raise ValueError("cannot quantize a matrix with non-finite values")
    codes, bytes_ = _quantize(tiles, form) if kept is None else _requantize(tiles, form, scale_bytes(kept))
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    data = codes if form.element == "e4m3" else (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    return Quantized(data, scale_as(bytes_, scale_dtype), form.block, form.element)


def _quantize(tiles: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes by the rule."""
    bytes_ = _rule(tiles, form)
    return _round(tiles, bytes_, form), bytes_


def _requantize(tiles: Tensor, form: Format, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes: the kept ones where they hold the values bit for bit, the rule elsewhere."""
    codes = _round(tiles, kept, form)
    unchanged = (_values(codes, kept, form).view(torch.int32) == tiles.view(torch.int32)).all(3).all(1)
    if bool(unchanged.all()):
        return codes, kept
    bytes_ = torch.where(unchanged, kept, _rule(tiles, form))
    return _round(tiles, bytes_, form), bytes_


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
    if not tiles.numel():
        return torch.empty(tiles.shape[0], tiles.shape[2], dtype=torch.uint8)
    amax = tiles.abs().amax((1, 3))
    bits = (amax * torch.tensor(1 / form.largest, dtype=torch.float32)).view(torch.int32)
    bytes_ = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return torch.where(amax == 0, E8M0_BIAS, bytes_).to(torch.uint8)


def _near_the_ends(bytes_: Tensor, form: Format) -> bool:
    """Whether some product may leave bfloat16: subnormal at the lower end, infinite at the upper."""
    low, high = (6, 246) if form.element == "e4m3" else (0, 252)
    return int(bytes_.min()) < low or int(bytes_.max()) > high


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns] as [row blocks, block rows, column blocks, block columns], padded with zeros."""
    rows, columns = x.shape
    pad_rows, pad_columns = -rows % block[0], -columns % block[1]
    if pad_rows or pad_columns:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows))
    return x.reshape(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def _scaled(elements: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = elements.shape
    tiles = _tiles(elements, block) * scale[:, None, :, None]
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()


def _round(tiles: Tensor, bytes_: Tensor, form: Format) -> Tensor:
    """fp32 tiles -> element codes of the same shape: float8_e4m3fn, or uint8 E2M1 codes."""
    x = tiles / powers_of_two(bytes_, torch.float32)[:, None, :, None]
    if form.element == "e4m3":
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    size = x.abs().clamp_max(E2M1_MAX)
    # Codes count steps of 1/2 below 2, of 1 below 4, of 2 up to 6: rounding the count to even is rounding to
    # the even code.
    steps = torch.where(size < 2.0, 2.0, torch.where(size < 4.0, 1.0, 0.5))
    before = torch.where(size < 2.0, 0.0, torch.where(size < 4.0, 2.0, 4.0))
    return ((size * steps).round() + before).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def _values(codes: Tensor, bytes_: Tensor, form: Format) -> Tensor:
    elements = codes.to(torch.float32) if form.element == "e4m3" else _e2m1_values()[codes.int()]
    return elements * powers_of_two(bytes_, torch.float32)[:, None, :, None]


@functools.cache
def _e2m1_values() -> Tensor:
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([positive, -positive])


@functools.cache
def _byte_pairs() -> Tensor:
    """int32 [256]: the two bfloat16 values of a packed byte, side by side in memory order."""
    byte = torch.arange(256)
    pairs = torch.stack([_e2m1_values()[byte & 15], _e2m1_values()[byte >> 4]], dim=1)
    return pairs.to(torch.bfloat16).view(torch.int32).flatten()


def _unpack(data: Tensor) -> Tensor:
    """int8 [rows, columns / 2] -> bfloat16 [rows, columns]."""
    pairs = _byte_pairs().index_select(0, data.contiguous().view(torch.uint8).flatten().int())
    return pairs.view(torch.bfloat16).reshape(data.shape[0], -1)
