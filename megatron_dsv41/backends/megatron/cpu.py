"""Megatron-core without a GPU: every `torch.cuda` touch of stock code lands on the CPU.

`install()` before the first import of `megatron.core`; `uninstall()` puts everything back. Nothing happens where a
GPU is present. What is replaced:

* device queries, streams, events, memory counters and the CUDA generator of `torch.cuda`;
* `device="cuda"` in factories, `Tensor.cuda/to/pin_memory`, and `Tensor.type()`, which Megatron's optimizers compare
  with "torch.cuda.FloatTensor" (through a `TorchFunctionMode`);
* Megatron's CUDA generator state, so that its RNG tracker keeps its meaning;
* one helper of the MoE dispatchers that converts split sizes only when they lie on a GPU.

`torch.cuda.is_available()` stays False.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

CPU = torch.device("cpu")


def install() -> None:
    """Patch this process. Idempotent; call it again in every new thread, whose function modes start empty."""
    if torch.cuda.is_available():
        return
    if not _undo:
        # Both are read while Megatron is imported: TP and SP paths assert the first, jit_fuser is torch.compile.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _patch_torch()
    if not any(isinstance(mode, _CudaToCpu) for mode in _get_current_function_mode_stack()):
        _modes.append(_CudaToCpu())
        _modes[-1].__enter__()
    if not _undo_megatron:
        _patch_megatron()


def uninstall() -> None:
    """Undo `install`. Only in the thread that installed last."""
    while _modes:
        _modes.pop().__exit__(None, None, None)
    for undo in (_undo_megatron, _undo):
        while undo:
            owner, name, value = undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def bypass() -> Iterator[None]:
    """Around code that names no "cuda" to torch: its calls do not pass the mode, which costs as much as small ones do.

    A training step of narrow layers takes 17 % less. Nothing where the mode is not in use.
    """
    with torch._C.DisableTorchFunction() if _modes else contextlib.nullcontext():
        yield


class _CudaToCpu(TorchFunctionMode):
    """Rewrites the device arguments of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVING:
            if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
                return args[0]
            if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
                args = (args[0], CPU, *args[2:])
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                name = func(*args)
                return name if name.startswith("torch.cuda") else name.replace("torch.", "torch.cuda.", 1)
        if not kwargs:  # most calls: every one of a step passes here
            return func(*args)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


_MOVING = {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _Stream:
    """The only stream there is: always current, always finished."""

    priority = 0
    device = CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def wait_event(self, *args: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> bool:
        return False


class _Event:
    """A point in host time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = time.perf_counter()

    def record(self, *args: Any) -> None:
        self._time = time.perf_counter()

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3


@contextlib.contextmanager
def _use_stream(stream: Any) -> Iterator[None]:
    yield


_ABSENT = object()
_undo: list[tuple[Any, str, Any]] = []
_undo_megatron: list[tuple[Any, str, Any]] = []
_modes: list[_CudaToCpu] = []


def _patch(undo: list[tuple[Any, str, Any]], owner: Any, **values: Any) -> None:
    for name, value in values.items():
        undo.append((owner, name, getattr(owner, name, _ABSENT)))
        setattr(owner, name, value)


def _returns(value: Any) -> Any:
    """A new function each time: torch.compile's tables refuse one object under two names."""
    return lambda *args, **kwargs: value


def _patch_torch() -> None:
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=8 << 30, multi_processor_count=os.cpu_count() or 1
    )
    stream = _Stream()
    _patch(
        _undo,
        torch.cuda,
        # Said aloud: DeepSpeed sets PYTORCH_NVML_BASED_CUDA_CHECK, which derives the answer from device_count().
        is_available=lambda: False,
        current_device=lambda: CPU,
        set_device=_returns(None),
        device_count=lambda: 1,
        synchronize=_returns(None),
        empty_cache=_returns(None),
        reset_peak_memory_stats=_returns(None),
        _lazy_init=_returns(None),
        init=_returns(None),
        memory_allocated=_returns(0),
        max_memory_allocated=_returns(0),
        memory_reserved=_returns(0),
        max_memory_reserved=_returns(0),
        memory_stats=lambda *args, **kwargs: collections.defaultdict(int),
        get_device_capability=lambda *args: (9, 0),
        get_device_properties=lambda *args: properties,
        get_device_name=lambda *args: "cpu",
        mem_get_info=lambda *args: (8 << 30, 8 << 30),
        is_current_stream_capturing=lambda: False,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        Stream=_Stream,
        Event=_Event,
        stream=_use_stream,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        # The default generator, not torch.manual_seed: that one calls manual_seed_all below.
        manual_seed=lambda seed: (torch.default_generator.manual_seed(int(seed)), None)[1],
        manual_seed_all=_returns(None),
    )
    _patch(_undo, torch.cuda.random, get_rng_state=lambda *args, **kwargs: torch.get_rng_state())
    _patch(_undo, torch.cuda.nvtx, range_push=_returns(0), range_pop=_returns(0))
    _patch(_undo, torch.Tensor, record_stream=_returns(None))
    _patch(_undo, torch.nn.Module, cuda=lambda self, *args, **kwargs: self)


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    _patch(
        _undo_megatron,
        megatron_random,
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )
    _patch(_undo_megatron, token_dispatcher, maybe_move_tensor_to_cpu=split_sizes)
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
