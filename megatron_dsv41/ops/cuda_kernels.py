"""CUDA C++ kernels, compiled by NVRTC when they are first called: no CUDA toolkit, no build step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

FOLDER = Path(__file__).parent
LARGEST_STATIC_SHARED = 48 * 1024  # bytes that need no opt-in
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_... of cuda.h


def include_folders(file: Path) -> list[str]:
    """Where a source file finds the headers that it includes: in its own folder, then in this one."""
    return [str(file.parent), str(FOLDER)]


@functools.cache
def kernel(file: Path, name: str, shared_bytes: int, device: int) -> Any:
    """The compiled kernel `name`, a template with its arguments, of `file`, for one device. Compiling takes seconds."""
    major, minor = torch.cuda.get_device_capability(device)
    # wgmma and setmaxnreg exist only in the architecture-specific target.
    target = f"{major}{minor}a" if major >= 9 else f"{major}{minor}"
    source, folders = file.read_text(), include_folders(file)
    # torch puts a toolkit's headers on the path and fails where there is no toolkit. The sources include none of them.
    home, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, cpp_extension.CUDA_HOME or "/"
    try:
        with torch.cuda.device(device):
            compiled = torch.cuda._compile_kernel(source, name, target, cuda_include_dirs=folders)
            if shared_bytes > LARGEST_STATIC_SHARED:
                compiled.set_shared_memory_config(shared_bytes)
    finally:
        cpp_extension.CUDA_HOME = home
    return compiled


def launch(
    file: Path,
    name: str,
    blocks: int,
    threads: int,
    *args: Tensor | int | float,
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """Launch on the first argument's device, on its current stream. Floats arrive as double, integers as int.

    early: its CTAs may start while the kernel before it in the stream still runs (programmatic dependent launch), from
    when that one says `griddepcontrol.launch_dependents` in all its CTAs. Every thread must say `griddepcontrol.wait`
    before it reads what that kernel writes, or writes what it reads.
    """
    first = args[0]
    assert isinstance(first, Tensor) and first.device.index is not None
    _enter_context(first.device.index)
    compiled = kernel(file, name, shared_bytes, first.device.index)
    if early:
        stream = torch.cuda.current_stream(first.device).cuda_stream
        _launch_early(compiled.func, blocks, threads, shared_bytes, stream, args)
    else:
        compiled(grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(args), shared_mem=shared_bytes)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_int), ("value", ctypes.c_longlong * 8)]


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def _launch_early(
    function: ctypes.c_void_p, blocks: int, threads: int, shared_bytes: int, stream: int, args: Sequence[Any]
) -> None:
    allowed = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_longlong * 8)(1))
    grid, block = (ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(threads, 1, 1)
    config = _Config(grid, block, shared_bytes, stream, ctypes.pointer(allowed), 1)
    values = [_value(arg) for arg in args]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, places, None))


def _value(arg: Tensor | int | float) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    return ctypes.c_int(arg) if isinstance(arg, int) else ctypes.c_double(arg)


def _enter_context(device: int) -> None:
    """Gives this thread the device's context. The driver's calls need one, and a thread, such as autograd's, has none
    until its first call of the runtime, which a tensor from torch's own pool of memory is not."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_driver().cuCtxSetCurrent(context))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA driver error {result}")
