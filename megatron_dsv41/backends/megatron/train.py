"""Entry to training on Megatron: prepares the process, then hands over to `trainer`. Imports no Megatron itself."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from megatron_dsv41.backends.megatron import launch
from megatron_dsv41.run_config import Run

# What Megatron's loggers call a warning in every run, and is none: how it begins.
NO_WARNINGS = {
    "megatron.core.rerun_state_machine": (  # which no run uses; the second twice around every evaluation
        "RerunStateMachine initialized in mode RerunMode.DISABLED",
        "Setting RerunStateMachine mode RerunMode.DISABLED",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCore's async save is deprecated",),  # saves wait here
}


def train(run: Run) -> int:
    """Run or resume training; the exit status. Call on every rank (torchrun, srun, or one plain process).

    ValueError for what the run asks wrongly, before the first step; NonFiniteLoss; OSError when a save fails.
    """
    with quiet(run.logging.megatron), gentle_interrupt():
        launch.prepare_process()
        with launch.world():
            from megatron_dsv41.backends.megatron import trainer

            return trainer.walk(run)


@contextlib.contextmanager
def gentle_interrupt() -> Iterator[None]:
    """The first Ctrl-C asks as SIGTERM does: the step ends and a checkpoint is written. The second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        print("stopping after this step, with a checkpoint; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def quiet(show: bool) -> Iterator[None]:
    """Megatron prints its set-up in hundreds of lines; unless `show`, what its loggers warn of remains, on stderr."""
    if show:
        yield
        return
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA runtime on a CPU machine
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Discard()), _logged_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        warnings.filterwarnings("ignore", category=SyntaxWarning)  # of a library that Python compiles anew
        warnings.filterwarnings("ignore", message="Detected a Jax installation")  # by Transformer Engine
        # Megatron's optimizer reads .grad of its own shards; the CPU runtime's function mode is where it surfaces.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        yield


@contextlib.contextmanager
def _logged_warnings() -> Iterator[None]:
    """What Megatron's loggers warn of goes to stderr; its own handler would write it to stdout, with all else."""
    logger, handler = logging.getLogger("megatron"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_warns)
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def _warns(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NO_WARNINGS.get(record.name, ()))


class _Discard(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)
