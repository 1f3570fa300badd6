"""Room for sums of gradients beside a backward pass.

NCCL's kernels hold multiprocessors while they run, and persistent matrix products that were planned for all of them
then take a second round (docs/benchmarks.md, where dp=2 loses). Here sums run on few multiprocessors, which products
leave free from the start of the backward pass that they run beside to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class ReduceRoom:
    """Multiprocessors that sums over `groups` are kept to, and matrix products left without, where that is asked for.

    Every group gets a second communicator for its sums; parameters are still gathered over the first. Collective.
    The room is torch's own setting, of its CUTLASS products and, as the preferred library, of cuBLASLt's.
    """

    def __init__(self, multiprocessors: int, groups: Iterable[ProcessGroup]):
        self.multiprocessors = multiprocessors
        torch.backends.cuda.preferred_blas_library("cublaslt")
        self.narrow: dict[tuple[int, ...], ProcessGroup] = {}
        for group in groups:
            ranks = _ranks(group)
            if len(ranks) > 1 and ranks not in self.narrow:
                self.narrow[ranks] = _copy(group, multiprocessors)
        self.replaced: list[tuple[Any, str, ProcessGroup]] = []

    def watch(self, output: Tensor, model: Any) -> None:
        """Make room when the backward pass of a stage's output begins, if gradients of `model` are summed beside it.

        model: the stage, wrapped by Megatron's DistributedDataParallel.
        """
        if output.requires_grad:
            output.register_hook(lambda grad: self._make(model))

    def take_back(self) -> None:
        """After the step's last sum."""
        torch._C._set_sm_carveout_experimental(None)
        for bucket, name, group in self.replaced:
            setattr(bucket, name, group)
        self.replaced.clear()

    def _make(self, model: Any) -> None:
        buckets = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        if not any(bucket.is_last_microbatch for bucket in buckets):
            return
        divided = model.ddp_config.use_distributed_optimizer
        name = "intra_distributed_optimizer_instance_group" if divided else "data_parallel_group"
        for bucket in buckets:
            group = getattr(bucket, name)
            narrow = self.narrow.get(_ranks(group), group)
            if narrow is not group:
                self.replaced.append((bucket, name, group))
                setattr(bucket, name, narrow)
        torch._C._set_sm_carveout_experimental(self.multiprocessors)


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _copy(group: ProcessGroup, multiprocessors: int) -> ProcessGroup:
    """A second communicator of the same ranks; over NCCL, its kernels have as many blocks as there is room for."""
    backend, options = dist.get_backend(group), None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = multiprocessors
    copy = dist.new_group(list(_ranks(group)), backend=backend, pg_options=options, use_local_synchronization=True)
    assert isinstance(copy, ProcessGroup)
    return copy
