"""What crosses from one pipeline stage to the next, as one flat tensor (DESIGN: the model under pipeline parallelism).

Streams, the fp32 `pre_mix` and exactly the shared state that `payload` names. fp32 values and integers travel bit for
bit through a bf16 wire, and gradients come back the same way. Fields without gradient lie at the end, so that the way
back carries only a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.parallel.payload import Field
from megatron_dsv41.parallel.sequence import gather_shards
from megatron_dsv41.parallel.tensor import gather_copies, keep_part


class BoundaryCodec:
    """Packs fields into one flat tensor of the wire dtype and back. Both directions are differentiable.

    `padded_numel`: length of the packed tensor where a schedule needs one length for every hop; default: no padding.
    What the processes of `tensor_group` or `context_group` hold alike crosses once, in parts that are gathered on
    arrival; groups are needed only for fields with such copies.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        wire: torch.dtype,
        padded_numel: int | None = None,
        tensor_group: ProcessGroup | None = None,
        context_group: ProcessGroup | None = None,
    ):
        self.fields, self.wire = tuple(fields), wire
        self.tensor_group, self.context_group = tensor_group, context_group
        self.sizes = [field.wire_bytes // wire.itemsize for field in fields]
        self.grad_numel = sum(size for field, size in zip(fields, self.sizes, strict=True) if field.has_gradient)
        used = sum(self.sizes)
        self.numel = used if padded_numel is None else padded_numel
        self.padding = self.numel - used
        assert self.padding >= 0, f"a boundary of {used} elements does not fit in {padded_numel}"

    def pack(self, streams_SBND: Tensor, pre_mix_SBN: Tensor, state: SharedState) -> Tensor:
        """One new tensor [numel]. AssertionError when a field has not the planned shape or dtype."""
        parts = []
        for field in self.fields:
            value = {"streams": streams_SBND, "pre_mix": pre_mix_SBN}.get(field.name)
            value = state.need(field.name) if value is None else value
            assert value.shape == field.shape and value.dtype == _dtype(field), (field, value.shape, value.dtype)
            part = self._own_part(value if field.has_gradient else value.detach(), field)
            parts.append(_Bits.apply(part, self.wire))
        if self.padding:
            parts.append(parts[0].new_zeros(self.padding))
        return torch.cat(parts)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, SharedState]:
        """(streams, pre_mix, state) from what `pack` made; views of `packed` where nothing is gathered."""
        values: dict[str, Tensor] = {}
        pieces = packed.view(-1)[: sum(self.sizes)].split(self.sizes)
        for field, piece in zip(self.fields, pieces, strict=True):
            piece = piece if field.has_gradient else piece.detach()
            flat = self._whole(_Bits.apply(piece, _dtype(field)), field)
            values[field.name] = flat[: math.prod(field.shape)].view(field.shape)
        streams, pre_mix = values.pop("streams"), values.pop("pre_mix")
        return streams, pre_mix, SharedState(**values)

    def _own_part(self, value: Tensor, field: Field) -> Tensor:
        copies = field.tensor_copies * field.context_copies
        flat = value.reshape(-1)
        flat = F.pad(flat, (0, copies * field.wire_bytes // field.item_bytes - flat.numel()))
        if field.context_copies > 1:
            flat = _chunk(flat, self.context_group)
        if field.tensor_copies == 1:
            return flat
        assert self.tensor_group is not None
        return _chunk(flat, self.tensor_group) if field.adds_over_tensor else keep_part(flat, self.tensor_group)

    def _whole(self, part: Tensor, field: Field) -> Tensor:
        if field.tensor_copies > 1:
            gather = gather_shards if field.adds_over_tensor else gather_copies
            part = gather(part, self.tensor_group)
        return gather_shards(part, self.context_group) if field.context_copies > 1 else part

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


def _chunk(flat: Tensor, group: ProcessGroup | None) -> Tensor:
    assert group is not None
    return flat.chunk(group.size())[group.rank()]


def _dtype(field: Field) -> torch.dtype:
    return getattr(torch, field.dtype)
