"""Engram table rows as bytes: how a table is published, and what crosses the wire when rows are fetched (SPEC 12.4)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from megatron_dsv41.ops.quant.codec import E8M0_BIAS, powers_of_two
from megatron_dsv41.ops.quant.ref import E4M3_MAX

RowDtype = Literal["float8", "bfloat16", "float32"]
SCALE_BLOCK = 32  # columns that share a scale


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """`dim` values of a row as `width` bytes. float8: E4M3 elements, then one E8M0 scale per 32 columns, as released.

    ValueError where float8 meets a dim that is not a multiple of 32.
    """

    dtype: RowDtype
    dim: int

    def __post_init__(self) -> None:
        if self.dtype == "float8" and self.dim % SCALE_BLOCK:
            raise ValueError(
                f"engram.table=float8 keeps one scale per {SCALE_BLOCK} columns, which does not divide "
                f"engram_head_dim {self.dim}: set engram.table=bfloat16"
            )

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return {"float8": self.dim + self.dim // SCALE_BLOCK, "bfloat16": 2 * self.dim, "float32": 4 * self.dim}[
            self.dtype
        ]

    @property
    def plain(self) -> torch.dtype | None:
        """The dtype whose tensors these bytes are; None: they are not values."""
        return None if self.dtype == "float8" else getattr(torch, self.dtype)

    def encode(self, values_RD: Tensor) -> Tensor:
        """Values [..., dim] -> uint8 [..., width], to nearest even; float8 by the published rule (SPEC 19.2)."""
        if self.plain is not None:
            return values_RD.to(self.plain).contiguous().view(torch.uint8)
        blocks = values_RD.to(torch.float32).unflatten(-1, (-1, SCALE_BLOCK))
        amax = blocks.abs().amax(-1)
        bits = (amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32, device=amax.device)).view(torch.int32)
        exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
        scale = torch.where(amax == 0, E8M0_BIAS, exponent).to(torch.uint8)
        # Division by a power of two as a product with its exact reciprocal.
        elements = blocks * powers_of_two(254 - scale, torch.float32)[..., None]
        data = elements.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([data.flatten(-2), scale], -1)

    def decode(self, bytes_RW: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 [..., width] -> values [..., dim]. bfloat16 holds every float8 row of normal scale exactly."""
        if self.plain is not None:
            return bytes_RW.contiguous().view(self.plain).to(dtype)
        data, scale = bytes_RW.split([self.dim, self.dim // SCALE_BLOCK], -1)
        elements = data.contiguous().view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, SCALE_BLOCK))
        return (elements * powers_of_two(scale, dtype)[..., None]).flatten(-2)


def as_words(rows_NW: Tensor) -> Tensor:
    """Rows of bytes as rows of the widest integers that they consist of: fewer elements to copy."""
    wide = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if rows_NW.shape[1] % dtype.itemsize == 0)
    return rows_NW.view(next(wide, torch.uint8))
