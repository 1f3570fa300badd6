"""The processes that carry out one job together: started by torchrun or srun, by `--processes`, or one alone."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pickle
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist

PATIENCE = datetime.timedelta(days=7)  # the others may be busy with a large shard


@dataclasses.dataclass(frozen=True)
class Team:
    """This process's number, how many there are, and how many of them share this machine's memory.

    group: a gloo group of all of them; None for one process, and for the default group.
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

    @classmethod
    def of_default_group(cls) -> Team:
        """All ranks of the default group, which talk through it; one process where there is no group."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def leads(self) -> bool:
        """Whether this is the process that makes and finishes folders."""
        return self.rank == 0

    def first[T](self, function: Callable[[], T]) -> T:
        """`function()` of the leading process; everyone gets its value or raises its error. Collective.

        The leading process raises the error with its traceback; the others one of its kind and message. A value that
        cannot be pickled is an error, too.
        """
        value, error = _attempt(function) if self.leads else (None, None)
        if self.size > 1:
            sent, unsendable = _attempt(lambda: pickle.dumps(value))
            error = error or unsendable
            outcome: list[Any] = [sent, error and _portable(error)]
            dist.broadcast_object_list(outcome, src=0, group=self.group)
            if not self.leads:
                sent, error = outcome
                value = pickle.loads(sent) if error is None else None
        if error is not None:
            raise error
        return cast("T", value)

    def together[T](self, function: Callable[[], T]) -> T:
        """Everyone's own `function()`; where one of them raises, everyone raises."""
        value, error = _attempt(function)
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


def _attempt[T](function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """`function()`, or the error that it raised, as an Exception: the others wait to hear of any.

    torch derives its CheckpointException from BaseException, and SystemExit is derived from it, too: callers, who catch
    Exception, get a RuntimeError with that as its cause. An interrupt is no outcome: it ends this process.
    """
    try:
        return function(), None
    except KeyboardInterrupt:
        raise
    except Exception as error:
        return None, error
    except BaseException as error:
        told = _portable(error)
        told.__cause__ = error
        return None, told


def _portable(error: BaseException) -> Exception:
    """The error as one that can be sent: its kind where callers tell kinds apart, and its message."""
    if isinstance(error, OSError):
        named = (error.errno, error.strerror, error.filename, None, error.filename2)
        return OSError(*named) if error.errno else OSError(str(error))
    if isinstance(error, ValueError):
        return ValueError(str(error))
    return RuntimeError(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")
