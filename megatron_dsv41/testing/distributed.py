"""Run a function on several gloo ranks of this machine: the harness of every distributed test.

Ranks are forked from a server process that has already imported torch (and Megatron, when asked), so a
run costs a fraction of a second instead of the seconds that the imports take.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PRELOAD = "megatron_dsv41.testing._preload"


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """`function(*args, **kwargs)` on `world_size` ranks; its results (numbers, strings, CPU tensors) in rank order.

    `function` must be a module-level function of an importable file. The default process group is gloo with a file
    rendezvous. The first rank that fails ends the others; its traceback is in the AssertionError.
    """
    context = _context()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        where = (str(Path(sys.modules[function.__module__].__file__ or "").resolve()), function.__module__)
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, f"{folder}/rendezvous", where, function.__qualname__, args, kwargs, results),
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            return _collect(processes, results, timeout)
        finally:
            for process in processes:
                _end(process)


def _collect(processes: list[Any], results: Any, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.5)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in values and p.exitcode not in (None, 0)]
            if dead and results.empty():
                raise AssertionError(f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(values))
                raise AssertionError(f"ranks {missing} did not finish in {timeout:.0f} s") from None
            continue
        if error is not None:
            # The others may wait for this rank in a collective forever: the caller ends them.
            raise AssertionError(f"rank {rank} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(processes))]


def _end(process: Any) -> None:
    if process.pid is None:
        return
    process.join(5 if process.exitcode is None else 0)
    if process.exitcode is None:
        process.terminate()
        process.join(5)
    if process.exitcode is None:
        process.kill()
        process.join()


def _context() -> Any:
    # The server is started by the first use and inherits this environment.
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
    results: Any,
) -> None:
    try:
        torch.set_num_threads(1)
        from megatron_dsv41.backends.megatron import cpu

        cpu.install()  # function modes do not survive into the thread that the fork server starts
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        value = _find(where, name)(*args, **kwargs)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        results.put((rank, value, None))
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
