"""Pipeline stages: their layers, what crosses each cut, and the communicator that carries it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.backends.megatron.layouts import plan_crossings, stage_layers
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.parallel.boundary import BoundaryCodec
from megatron_dsv41.parallel.payload import Crossing
from megatron_dsv41.phase import Phase
from megatron_dsv41.run_config import Parallel


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Layers of all stages, and what crosses each cut for micro-batches of one shape."""

    stages: tuple[range, ...]
    crossings: tuple[Crossing, ...]  # before every stage but the first
    wire: torch.dtype
    one_length: bool  # interleaved schedules know one length for all hops: the longest

    @classmethod
    def of(cls, config: DSV41Config, phase: Phase, parallel: Parallel, batch: int, seq: int) -> Self:
        """The pipeline of a layout, for micro-batches of `batch` whole sequences of `seq` tokens."""
        return cls(
            stages=tuple(stage_layers(config, parallel)),
            crossings=plan_crossings(config, phase, parallel, batch, seq),
            wire=getattr(torch, config.dtype),
            one_length=parallel.vpp > 1,
        )

    def before(self, stage: int) -> Crossing | None:
        """The cut before a stage; None before the first."""
        return self.crossings[stage - 1] if stage else None

    def after(self, stage: int) -> Crossing | None:
        """The cut after a stage; None after the last."""
        return self.crossings[stage] if stage < len(self.crossings) else None

    def codec(
        self, crossing: Crossing, tensor_group: ProcessGroup | None = None, context_group: ProcessGroup | None = None
    ) -> BoundaryCodec:
        """What packs the values of a cut; a model's needs the groups that hold them."""
        longest = max(crossing.forward_bytes for crossing in self.crossings) // self.wire.itemsize
        padded = longest if self.one_length else None
        return BoundaryCodec(crossing.fields, self.wire, padded, tensor_group, context_group)


class BoundaryCommunicator(P2PCommunicator):
    """Stock communicator whose buffers have the size of our payloads; 1F1B.

    Gradients travel without the part that is zero by construction.
    """

    def __init__(self, group: ProcessGroup, config: Any, before: BoundaryCodec | None, after: BoundaryCodec | None):
        super().__init__(group, config)
        self.before, self.after = before, after

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """A packed boundary from the previous stage."""
        return super().recv_forward(self._shapes(self.before, "numel"), is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """The gradient of what this stage sent on."""
        return self._received(super().recv_backward(self._shapes(self.after, "grad_numel"), is_last_stage))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """The gradient of what this stage received."""
        super().send_backward(self._to_send(input_tensor_grads), is_first_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """See the two."""
        shapes = self._shapes(self.after, "grad_numel")
        return self._received(super().send_forward_recv_backward(output_tensors, shapes, is_last_stage))

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """See the two."""
        shapes = self._shapes(self.before, "numel")
        return super().send_backward_recv_forward(self._to_send(input_tensor_grads), shapes, is_first_stage)

    @staticmethod
    def _shapes(codec: BoundaryCodec | None, length: str) -> list[tuple[int]]:
        return [(getattr(codec, length) if codec else 0,)]

    def _to_send(self, gradients: Any) -> Any:
        if self.before is None:
            return gradients
        gradients = gradients if isinstance(gradients, list) else [gradients]
        return [None if g is None else self.before.gradient_to_wire(g) for g in gradients]

    def _received(self, gradients: Any) -> Any:
        if self.after is None:
            return gradients
        return [None if g is None else self.after.gradient_from_wire(g) for g in gradients]


class InterleavedCommunicator(P2PCommunicator):
    """Stock communicator with one buffer size for every hop, for interleaved schedules."""

    def __init__(self, group: ProcessGroup, config: Any, numel: int):
        super().__init__(group, config)
        self.numel = numel

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """A packed boundary from the previous stage."""
        return super().recv_forward(torch.Size([self.numel]), is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """The gradient of what this stage sent on."""
        return super().recv_backward(torch.Size([self.numel]), is_last_stage)

    def send_forward_recv_forward(
        self, output_tensor: Tensor, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """See the two."""
        return super().send_forward_recv_forward(output_tensor, recv_prev, torch.Size([self.numel]), overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        """See the two."""
        return super().send_backward_recv_backward(
            input_tensor_grad, recv_next, torch.Size([self.numel]), overlap_p2p_comm
        )

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Tensor, input_tensor_grad: Tensor, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> Any:
        """All four."""
        return super().send_forward_backward_recv_forward_backward(
            output_tensor, input_tensor_grad, recv_prev, recv_next, torch.Size([self.numel])
        )


def communicator(
    boundaries: Boundaries, group: ProcessGroup, config: Any
) -> BoundaryCommunicator | InterleavedCommunicator:
    """The communicator of this rank."""
    if boundaries.one_length:
        return InterleavedCommunicator(group, config, boundaries.codec(boundaries.crossings[0]).numel)
    before, after = boundaries.before(group.rank()), boundaries.after(group.rank())
    codecs = (boundaries.codec(crossing) if crossing else None for crossing in (before, after))
    return BoundaryCommunicator(group, config, *codecs)
