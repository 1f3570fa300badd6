"""Run a function on several gloo ranks of this machine: the harness of every distributed test.

Ranks on CPUs are forked from a server process that has already imported torch and Megatron, so a run costs a fraction
of a second instead of the seconds that the imports take.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PRELOAD = "megatron_dsv41.testing._preload"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 180.0,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """`function(*args, **kwargs)` on `world_size` ranks; its results (picklable) in rank order.

    `function` must be a module-level function of an importable file. The default process group is gloo with a file
    rendezvous; with device "cuda" every rank computes on its GPU (`parallel.environment.rank_gpu`), and tensors there
    go through NCCL. The first rank that fails ends the others; its traceback is in the AssertionError.
    """
    with Ranks(function, world_size, *args, device=device, **kwargs) as ranks:
        return ranks.results(timeout)


class Ranks:
    """Started ranks, for tests that interfere with them. A context manager: at its end no rank is left."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        device: str = "cpu",
        backend: str | None = None,
        **kwargs: Any,
    ):
        """backend: of the default process group; None: gloo, and NCCL for what lies on GPUs."""
        context = _context(device)
        self._queue: Any = context.Queue()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        where = (str(Path(sys.modules[function.__module__].__file__ or "").resolve()), function.__module__)
        job = (
            f"{self._folder.name}/rendezvous",
            where,
            function.__qualname__,
            args,
            kwargs,
            device,
            backend,
            self._queue,
        )
        self.processes = [
            context.Process(target=_rank_main, args=(rank, world_size, *job)) for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self.processes:
            _end(process, grace=0.0 if any(error) else 5.0)
        self._folder.cleanup()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL every rank and wait until they are gone."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        """Poll `condition`; AssertionError when a rank ends or the time passes before it holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [rank for rank, process in enumerate(self.processes) if process.exitcode is not None]
            if ended and not condition():
                self.results(1.0)
                raise AssertionError(f"rank {ended[0]} ended before the condition held")
            if time.monotonic() > deadline:
                raise AssertionError(f"the condition did not hold within {timeout:.0f} s")
            time.sleep(0.005)

    def results(self, timeout: float = 180.0) -> list[Any]:
        """What the ranks return, in rank order. AssertionError for a failed, dead or late rank."""
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        while len(values) < len(self.processes):
            try:
                rank, value, error = self._queue.get(timeout=0.2)
            except queue.Empty:
                self._check_alive(values, deadline, timeout)
                continue
            if error is not None:
                # The others may wait for this rank in a collective forever: leaving the context ends them.
                raise AssertionError(f"rank {rank} failed:\n{error}")
            values[rank] = pickle.loads(value)
        return [values[rank] for rank in range(len(self.processes))]

    def _check_alive(self, values: dict[int, Any], deadline: float, timeout: float) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in values and process.exitcode not in (None, 0) and self._queue.empty():
                raise AssertionError(f"rank {rank} died with exit code {process.exitcode}")
        if time.monotonic() > deadline:
            missing = sorted(set(range(len(self.processes))) - set(values))
            raise AssertionError(f"ranks {missing} did not finish in {timeout:.0f} s")


def _end(process: Any, grace: float) -> None:
    process.join(grace)
    if process.exitcode is None:
        process.terminate()
        process.join(2)
    if process.exitcode is None:
        process.kill()
        process.join()


def _context(device: str) -> Any:
    if device == "cuda":  # what the server has imported touches CUDA, which no forked process can use then
        return multiprocessing.get_context("spawn")
    return fork_server()


def fork_server() -> Any:
    """The context of processes that have imported everything. A process has one such server: all tests share it.

    It is started by the first use and inherits the environment.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str,
    where: tuple[str, str],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    backend: str | None,
    results: Any,
) -> None:
    try:
        import torch

        from megatron_dsv41.backends.megatron import cpu, patches
        from megatron_dsv41.parallel.environment import rank_gpu

        cpu.install()  # function modes belong to a thread: enter them in the one that runs the test
        patches.fix_stock()  # a spawned rank has not imported the server's modules
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's sequence parallelism asks for it
        if device == "cuda":
            torch.cuda.set_device(rank_gpu(rank, torch.cuda.device_count()))
        backend, rendezvous = backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"), f"file://{rendezvous}"
        torch.distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
        value = _find(where, name)(*args, **kwargs)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        # By value: the tensors of a queue live in memory that ends with this process.
        results.put((rank, pickle.dumps(value), None))
    except BaseException:  # whatever it was, the parent reports it
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()


def _find(where: tuple[str, str], name: str) -> Callable[..., Any]:
    file, module_name = where
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(module_name), name)
    with _importing_from(Path(file).parent):  # a test file that pytest imported by path
        specification = importlib.util.spec_from_file_location(module_name, file)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[module_name] = module
        specification.loader.exec_module(module)
        return getattr(module, name)


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
