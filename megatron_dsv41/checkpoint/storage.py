"""How a tensor of the released layout is stored: dtypes by their safetensors names, codecs for the quantized ones.

A plain tensor is one entry. A quantized `X.weight` is two: the elements, and `X.scale` beside them (SPEC 18).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch

from megatron_dsv41.ops.quant.codec import FP4_ROW32, FP8_BLOCK32, FP8_ROW32, Format

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
FLOATS = ("F32", "BF16", "F16")  # what a plain weight may be stored as
QUANTIZED = ("F8_E4M3", "I8")
SCALES = ("F8_E8M0", "U8", "F32")  # what block scales may be stored as


class Storage(enum.Enum):
    """Storage of one kind of tensor in the release."""

    PLAIN = "plain"  # bfloat16; in an unquantized checkpoint the dtype of the config
    FLOAT32 = "float32"  # float32 in every checkpoint and in training
    FP8_BLOCK32 = "fp8_block32"  # E4M3, one scale per 32x32 tile
    FP8_ROW32 = "fp8_row32"  # E4M3, one scale per 32 columns of a row
    FP4_ROW32 = "fp4_row32"  # E2M1, two columns a byte, one scale per 32 columns of a row

    @property
    def format(self) -> Format | None:
        """The codec, or None for plain tensors."""
        return FORMATS.get(self)


FORMATS = {
    Storage.FP8_BLOCK32: FP8_BLOCK32,
    Storage.FP8_ROW32: FP8_ROW32,
    Storage.FP4_ROW32: FP4_ROW32,
}


def stored_format(dtype: str, storage: Storage) -> Format | None:
    """The codec of a tensor found as `dtype` where the table says `storage`: the file's dtype decides (SPEC 19.1).

    int8 is packed FP4 by rows; E4M3 is by rows where the table says so (Engram tables), else by tiles.
    """
    if dtype == "I8":
        return FP4_ROW32
    if dtype == "F8_E4M3":
        return FP8_ROW32 if storage is Storage.FP8_ROW32 else FP8_BLOCK32
    return None


def format_dtype(form: Format) -> str:
    """safetensors dtype of a codec's elements."""
    return "F8_E4M3" if form.element == "e4m3" else "I8"


def scale_name(weight: str) -> str:
    """Name of the scales of a quantized tensor: X.weight -> X.scale."""
    return weight.removesuffix("weight") + "scale"


def weight_name(scale: str) -> str:
    """The inverse of `scale_name`."""
    return scale.removesuffix("scale") + "weight"


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a stored tensor."""
    return TORCH_DTYPES[dtype].itemsize * math.prod(shape)


def wider(a: str, b: str) -> str:
    """The float dtype that holds the values of both without rounding."""
    promoted = torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])
    return DTYPE_NAMES[promoted]


def config_dtype(dtype: str) -> str:
    """safetensors name of a config's `dtype`."""
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    if dtype not in names:
        raise ValueError(f"config dtype is {dtype!r}, must be one of {', '.join(names)}")
    return names[dtype]
