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
    """Megatron prints its set-up in hundreds of lines; unless `show`, only what its loggers call a warning remains."""
    if show:
        yield
        return
    logging.getLogger("megatron").setLevel(logging.WARNING)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA runtime on a CPU machine
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Discard()):
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        # Megatron's optimizer reads .grad of its own shards; the CPU runtime's function mode is where it surfaces.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        yield


class _Discard(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)
