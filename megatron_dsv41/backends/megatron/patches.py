"""The places where stock Megatron-core 0.19.2 must be changed or offers no seam. Each with its reason; nowhere else.

`fix_stock()` repairs defects. `hooked(hooks)` lets our trainer answer where `megatron.training.pretrain` calls a
module function of its own and takes no argument for it.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def fix_stock() -> None:
    """Repair what is broken in the released wheel. Idempotent."""
    if getattr(fix_stock, "done", False):
        return
    _no_compilation_of_shipped_helpers()
    _results_of_synchronous_saves_in_this_process()
    _torch_adamw_state_of_distributed_optimizer()
    fix_stock.done = True  # type: ignore[attr-defined]


def _no_compilation_of_shipped_helpers() -> None:
    """The wheel ships the dataset helpers compiled and without their Makefile; pretrain() runs make and exits."""
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


def _results_of_synchronous_saves_in_this_process() -> None:
    """A synchronous save writes with threads of this process, yet stock starts a manager process for their results.

    That takes as long as the imports and runs an unguarded training script a second time.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _torch_adamw_state_of_distributed_optimizer() -> None:
    """Three defects of the path without TE and Apex, where the inner optimizer is torch.optim.AdamW.

    1. Loading looks a `step` tensor up among the saved tensors and ends in KeyError: `step` is common state.
    2. `load_state_dict` gives all parameters ONE step tensor, which AdamW then advances once per parameter: the
       bias correction of every resumed run is wrong, silently.
    3. `state_dict` asserts that `step` exists, so that an optimizer that has not stepped cannot be a load target.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    if HAVE_APEX_OR_TE:
        return
    stock_set = DistributedOptimizer._set_main_param_and_optimizer_states
    stock_state_dict = DistributedOptimizer.state_dict
    stock_load = DistributedOptimizer.load_state_dict

    @functools.wraps(stock_set)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        stock_set(self, model_param, {"step": None, **tensors})

    @functools.wraps(stock_state_dict)
    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return stock_state_dict(self)

    @functools.wraps(stock_load)
    def load_state_dict(self: Any, values: Any) -> None:
        stock_load(self, values)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].detach().clone()

    patched: Any = DistributedOptimizer
    patched._set_main_param_and_optimizer_states = set_states
    patched.state_dict = state_dict
    patched.load_state_dict = load_state_dict


# What `hooked` may answer. The reason is what pretrain() would otherwise do.
HOOKS = {
    "initialize_megatron": "asserts that CUDA is there",
    "get_forward_backward_func": "starts a schedule, in which stages wait for each other, before a step's data is read",
    "training_log": "prints its own line; counts FLOPs of another architecture",
    "num_floating_point_operations": "counts from arguments that do not describe this model",
    "evaluate": "returns the validation loss to a function that only prints it",
    "save_checkpoint": "writes in place: killed inside, it leaves a torn tracker file and a torn folder",
    "load_checkpoint": "reports a wrong tensor after half an hour, or not at all",
    "get_optimizer_param_scheduler": "counts samples, whose length in tokens changes with the phase",
    "get_megatron_optimizer": "builds only optimizers of its own",
    "get_megatron_optimizer_config": "derives weight decay from shapes instead of names",
}


@contextlib.contextmanager
def hooked(hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, `megatron.training.training` calls `hooks[name](stock function, *its arguments)`."""
    from megatron.training import training

    unknown = set(hooks) - set(HOOKS)
    assert not unknown, f"{unknown} have no documented reason"
    stock = {name: getattr(training, name) for name in hooks}
    try:
        for name, hook in hooks.items():
            setattr(training, name, functools.partial(hook, stock[name]))
        yield
    finally:
        for name, function in stock.items():
            setattr(training, name, function)
