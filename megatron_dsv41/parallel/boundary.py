"""What crosses from one pipeline stage to the next, as one flat tensor (DESIGN: the model under pipeline parallelism).

Streams, the fp32 `pre_mix` and exactly the shared state that `payload` names. fp32 values and integers travel bit for
bit through a bf16 wire, and gradients come back the same way. Fields without gradient lie at the end, so that the way
back carries only a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.parallel.payload import Field


class BoundaryCodec:
    """Packs fields into one flat tensor of the wire dtype and back. Both directions are differentiable.

    `padded_numel`: length of the packed tensor where a schedule needs one length for every hop; default: no padding.
    """

    def __init__(self, fields: Sequence[Field], wire: torch.dtype, padded_numel: int | None = None):
        self.fields, self.wire = tuple(fields), wire
        self.sizes = [field.wire_bytes // wire.itemsize for field in fields]
        self.grad_numel = sum(size for field, size in zip(fields, self.sizes, strict=True) if field.has_gradient)
        used = sum(self.sizes)
        self.numel = used if padded_numel is None else padded_numel
        self.padding = self.numel - used
        assert self.padding >= 0, f"a boundary of {used} elements does not fit in {padded_numel}"

    def pack(self, streams_SBND: Tensor, pre_mix_SBN: Tensor, state: SharedState) -> Tensor:
        """One new tensor [numel]. AssertionError when a field has not the planned shape or dtype."""
        parts = []
        for field, size in zip(self.fields, self.sizes, strict=True):
            value = {"streams": streams_SBND, "pre_mix": pre_mix_SBN}.get(field.name)
            value = state.need(field.name) if value is None else value
            assert value.shape == field.shape and value.dtype == _dtype(field), (field, value.shape, value.dtype)
            flat = _Bits.apply(value.reshape(-1) if field.has_gradient else value.detach().reshape(-1), self.wire)
            parts.append(flat)
            if size > flat.numel():
                parts.append(flat.new_zeros(size - flat.numel()))
        if self.padding:
            parts.append(parts[0].new_zeros(self.padding))
        return torch.cat(parts)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, SharedState]:
        """(streams, pre_mix, state) from what `pack` made; views of `packed`."""
        values: dict[str, Tensor] = {}
        pieces = packed.view(-1)[: sum(self.sizes)].split(self.sizes)
        for field, piece in zip(self.fields, pieces, strict=True):
            piece = piece if field.has_gradient else piece.detach()
            flat = _Bits.apply(piece[: field.num_bytes // self.wire.itemsize], _dtype(field))
            values[field.name] = flat.view(field.shape)
        streams, pre_mix = values.pop("streams"), values.pop("pre_mix")
        return streams, pre_mix, SharedState(**values)

    def gradient_to_wire(self, gradient: Tensor) -> Tensor:
        """The part of a packed gradient that is not zero by construction."""
        return gradient.view(-1)[: self.grad_numel]

    def gradient_from_wire(self, received: Tensor) -> Tensor:
        """The packed gradient [numel] from what `gradient_to_wire` made at the other end."""
        rest = self.numel - self.grad_numel
        return torch.cat([received, received.new_zeros(rest)]) if rest else received


class _Bits(torch.autograd.Function):
    """The bits of a flat tensor as another dtype, values forward and gradients backward.

    Sound because nothing computes with the packed tensor: it is made by one `cat`, copied, and split again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.contiguous().view(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].contiguous().view(ctx.dtype), None


def _dtype(field: Field) -> torch.dtype:
    return getattr(torch, field.dtype)
