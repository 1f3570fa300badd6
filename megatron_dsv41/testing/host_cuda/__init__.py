"""CUDA C++ kernels on the CPU, for tests: the kernels' own files, compiled by g++, with threads as fibers.

The files keep their inline PTX in headers of their own, whose place instructions.h takes. What this shows: indices,
swizzles, fragments, waits and barriers, argument lists, sizes of shared memory. What it does not: speed, and how a GPU
orders memory between threads that no barrier orders.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv41.ops.cuda_kernels import include_folders

FOLDER = Path(__file__).parent
DTYPES = {"float": torch.float32, "u16": torch.bfloat16, "int": torch.int32, "long long": torch.int64}
SCALARS = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "double": ctypes.c_double, "float": ctypes.c_float}


class Schedule(NamedTuple):
    """In which order threads take turns (0 ascending, 1 descending, 2 mixed), and whether copies land late."""

    order: int = 0
    late_copies: bool = True


SCHEDULES = (Schedule(0, True), Schedule(1, False), Schedule(2, True))


class HostKernels:
    """Kernels of some files, compiled for the host into `folder`. `launch` is that of ops/cuda_kernels.py.

    instances: file -> its kernels as they are launched, such as "site_forward<true, 320>". schedule may be changed
    between launches. ValueError: a file lacks a kernel; RuntimeError: what g++ says.
    """

    def __init__(self, instances: Mapping[Path, Sequence[str]], folder: Path):
        self.schedule = Schedule()
        self._files = {
            file: _File(file, names, folder / f"kernels{number}")
            for number, (file, names) in enumerate(instances.items())
        }

    def launch(
        self,
        file: Path,
        name: str,
        blocks: int,
        threads: int,
        *arguments: Tensor | int | float,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Run a kernel of those that `file` was compiled with, whatever `early`.

        RuntimeError: what is wrong in it; TypeError: in the call.
        """
        self._files[file].run(name, arguments, (blocks, threads, shared_bytes), self.schedule)


class _File:
    """Kernels of one file, compiled into `target`.cpp and `target`.so."""

    def __init__(self, file: Path, instances: Sequence[str], target: Path):
        source = file.read_text()
        self._parameters = {name: _parameters(file, source, name) for name in instances}
        text, library = target.with_suffix(".cpp"), target.with_suffix(".so")
        text.write_text(_on_host(source) + "".join(map(_wrapper, instances, self._parameters.values())))
        # Without contraction: a rounding of products that g++ chose would be another one than nvcc's anyway.
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
        folders = [f"-I{folder}" for folder in (FOLDER, *include_folders(file))]
        done = subprocess.run(
            ["g++", *options, *folders, str(text), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"g++ does not take the kernels of {file.name}:\n{done.stderr[-4000:]}")
        self._library = ctypes.CDLL(str(library))

    def run(
        self, name: str, arguments: Sequence[Tensor | int | float], sizes: tuple[int, int, int], schedule: Schedule
    ) -> None:
        """sizes: blocks, threads of each, bytes of shared memory of each."""
        parameters = self._parameters[name]
        if len(arguments) != len(parameters):
            raise TypeError(f"{name} takes {len(parameters)} arguments, got {len(arguments)}")
        self._library.host_tensor(None, ctypes.c_longlong(-1))
        given = [argument.data_ptr() for argument in arguments if isinstance(argument, Tensor)]
        values = [
            self._value(name, parameter, argument, given)
            for parameter, argument in zip(parameters, arguments, strict=True)
        ]
        self._library.host_settings(schedule.order, int(schedule.late_copies))
        function = getattr(self._library, _symbol(name))
        function.restype = ctypes.c_char_p
        message = function(*map(ctypes.c_uint, sizes), *values).decode()
        if message:
            raise RuntimeError(f"{name}: {message}")

    def _value(
        self, name: str, parameter: str, argument: Tensor | int | float, given: Sequence[int]
    ) -> ctypes._SimpleCData:
        """What the call gives to a parameter. given: addresses of all tensors of the call."""
        kind, is_pointer = parameter.rpartition(" ")[0].removeprefix("const ").rstrip("* "), "*" in parameter
        if not is_pointer:
            if isinstance(argument, Tensor) or (kind in ("int", "long long") and not isinstance(argument, int)):
                raise TypeError(f"{name}: {parameter} got {argument!r}")
            return SCALARS[kind](argument)
        if not isinstance(argument, Tensor):
            raise TypeError(f"{name}: {parameter} takes a tensor, got {argument!r}")
        if argument.dtype != DTYPES[kind] and given.count(argument.data_ptr()) > 1:
            return ctypes.c_void_p()  # a tensor in place of one that the kernel does not use: nothing can be read there
        if argument.dtype != DTYPES[kind] or not argument.is_contiguous():
            got = f"{argument.dtype} with strides {argument.stride()}"
            raise TypeError(f"{name}: {parameter} takes a contiguous tensor of {DTYPES[kind]}, got {got}")
        place = ctypes.c_void_p(argument.data_ptr())
        self._library.host_tensor(place, ctypes.c_longlong(argument.numel() * argument.element_size()))
        return place


def _on_host(source: str) -> str:
    source = re.sub(r"extern __shared__ [^;]*\bmemory\[\];", "unsigned char* memory = host::shared;", source)
    return f'#include "instructions.h"\n{source}'


def _parameters(file: Path, source: str, name: str) -> list[str]:
    """A kernel's parameters, as "const float* post"."""
    found = re.search(rf"__global__[^;{{]*?\b{name.partition('<')[0]}\(([^{{]*?)\)\s*\{{", source)
    if found is None:
        raise ValueError(f"{file.name} has no kernel {name}")
    return [" ".join(part.split()).replace(" *", "* ") for part in found[1].split(",")]


def _wrapper(name: str, parameters: Sequence[str]) -> str:
    names = ", ".join(parameter.split()[-1] for parameter in parameters)
    return (
        f'extern "C" const char* {_symbol(name)}(unsigned blocks, unsigned threads, unsigned bytes, '
        f"{', '.join(parameters)}) {{ return host::launch({name}, blocks, threads, bytes, {names}); }}\n"
    )


def _symbol(name: str) -> str:
    return "run_" + re.sub(r"\W+", "_", name)
