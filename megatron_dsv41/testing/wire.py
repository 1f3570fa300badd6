"""Bytes on the wire: what this rank sends over each process group, counted at torch.distributed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Bytes that a rank of a ring of n sends for a call: of (largest tensor's bytes, n).
RING: dict[str, Callable[[int, int], float]] = {
    "all_gather_into_tensor": lambda whole, n: whole / n * (n - 1),
    "reduce_scatter_tensor": lambda whole, n: whole / n * (n - 1),
    "all_reduce": lambda whole, n: 2 * whole / n * (n - 1),
}


class WireMeter:
    """Counts while `running`. A group's count includes point-to-point messages inside it."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = defaultdict(float)

    def sent(self, group: ProcessGroup) -> float:
        """Bytes that this rank sent over `group`."""
        return self._sent[id(group)]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count inside the block."""
        stock = {name: getattr(dist, name) for name in [*RING, "batch_isend_irecv"]}
        try:
            for name in RING:
                setattr(dist, name, self._counted(stock[name], RING[name]))
            dist.batch_isend_irecv = self._counted_messages(stock["batch_isend_irecv"])
            yield
        finally:
            for name, function in stock.items():
                setattr(dist, name, function)

    def _counted(self, function: Callable[..., Any], cost: Callable[[int, int], float]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((a for a in args if isinstance(a, ProcessGroup)), dist.group.WORLD)
            assert group is not None
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._sent[id(group)] += cost(max(tensor.nbytes for tensor in tensors), group.size())
            return function(*args, **kwargs)

        return count

    def _counted_messages(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    self._sent[id(operation.group)] += operation.tensor.nbytes
            return function(operations)

        return count
