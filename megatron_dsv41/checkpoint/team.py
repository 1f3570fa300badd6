"""The processes that carry out one job together: started by torchrun or srun, by `--processes`, or one alone."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist

PATIENCE = datetime.timedelta(days=7)  # the others may be busy with a large shard


@dataclasses.dataclass(frozen=True)
class Team:
    """This process's number, how many there are, and how many of them share this machine's memory.

    group: a gloo group of all of them; None for one process.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    group: Any = None

    @classmethod
    def of_world(cls, local_size: int | None = None) -> Team:
        """All ranks of the initialised default group. Collective."""
        size = dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), size, local_size or int(os.environ.get("LOCAL_WORLD_SIZE", size)), group)

    @property
    def leads(self) -> bool:
        """Whether this is the process that makes and finishes folders."""
        return self.rank == 0

    def first[T](self, function: Callable[[], T]) -> T:
        """`function()` of the leading process; everyone gets its value or raises its error."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        error: BaseException | None = None
        if self.leads:
            try:
                outcome[0] = function()
            except Exception as caught:
                error, outcome[1] = caught, _portable(caught)
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise error or outcome[1]
        return outcome[0]

    def together[T](self, function: Callable[[], T]) -> T:
        """Everyone's own `function()`; where one of them raises, everyone raises."""
        value, error = None, None
        try:
            value = function()
        except Exception as caught:
            error = caught
        self.agree(error)
        return cast("T", value)

    def agree(self, error: Exception | None) -> None:
        """Raise this process's error, or the first of another's. Everyone calls it."""
        errors: list[Any] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(errors, error and _portable(error), group=self.group)
        if error is not None:
            raise error
        for other in errors:
            if other is not None:
                raise other


def _portable(error: BaseException) -> Exception:
    """The error as one that can be sent: its kind where callers tell kinds apart, and its message."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror) if error.errno else OSError(str(error))
    return ValueError(str(error)) if isinstance(error, ValueError) else RuntimeError(f"{type(error).__name__}: {error}")
