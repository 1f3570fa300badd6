"""Bytes on the wire: what this rank sends over each process group, counted at torch.distributed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron_dsv41.experiments.traces import Call

# Bytes that a rank of a ring of n sends for a call: of (largest tensor's bytes, n).
RING: dict[str, Callable[[float, int], float]] = {
    "all_gather_into_tensor": lambda whole, n: whole / n * (n - 1),
    "reduce_scatter_tensor": lambda whole, n: whole / n * (n - 1),
    "all_reduce": lambda whole, n: 2 * whole / n * (n - 1),
}
OTHERS = ("all_to_all_single", "batch_isend_irecv")


class WireMeter:
    """Counts while `running`. A group's count includes point-to-point messages inside it.

    ranges: every call is a range of torch's profiler that says what it is (`experiments.traces`).
    """

    def __init__(self, ranges: bool = False) -> None:
        self._sent: dict[int, float] = defaultdict(float)
        self.ranges = ranges

    def sent(self, group: ProcessGroup) -> float:
        """Bytes that this rank sent over `group`."""
        return self._sent[id(group)]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count inside the block."""
        stock = {name: getattr(dist, name) for name in [*RING, *OTHERS]}
        try:
            for name in RING:
                setattr(dist, name, self._counted(stock[name], RING[name]))
            dist.all_to_all_single = self._counted_exchange(stock["all_to_all_single"])
            dist.batch_isend_irecv = self._counted_messages(stock["batch_isend_irecv"])
            yield
        finally:
            for name, function in stock.items():
                setattr(dist, name, function)

    def _counted(self, function: Callable[..., Any], cost: Callable[[float, int], float]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((a for a in args if isinstance(a, ProcessGroup)), None) or _world()
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            with self._call(group, cost(max(tensor.nbytes for tensor in tensors), group.size())):
                return function(*args, **kwargs)

        return count

    def _counted_exchange(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(
            output: Tensor,
            input: Tensor,
            output_split_sizes: Sequence[int] | None = None,
            input_split_sizes: Sequence[int] | None = None,
            group: ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            group, rows = group or _world(), input.shape[0] if input.dim() else 0
            own = input_split_sizes[group.rank()] if input_split_sizes is not None else rows / group.size()
            with self._call(group, input.nbytes * (1 - own / rows) if rows else 0.0):
                return function(output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

        return count

    def _counted_messages(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(operations: list[Any]) -> Any:
            with contextlib.ExitStack() as stack:
                for group in {id(operation.group): operation.group for operation in operations}.values():
                    own = [o for o in operations if o.group is group and o.op is dist.isend]
                    stack.enter_context(self._call(group or _world(), sum(o.tensor.nbytes for o in own), message=True))
                return function(operations)

        return count

    @contextlib.contextmanager
    def _call(self, group: ProcessGroup, num_bytes: float, message: bool = False) -> Iterator[None]:
        self._sent[id(group)] += num_bytes
        if not self.ranges:
            yield
            return
        call = Call(group.group_desc, tuple(dist.get_process_group_ranks(group)), message, float(num_bytes))
        with record_function(call.range_name()):
            yield


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
