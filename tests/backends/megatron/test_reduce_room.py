"""Sums of gradients over communicators of their own: the same losses, and parameters over the first ones."""

import pytest
import torch

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

OVERLAPPED = ("megatron.overlap_grad_reduce=true", "train.steps=3", "phase.index_loss=sparse")


def train(folder, room, *overrides):
    """On a rank: buckets that changed their group, by step; groups of all buckets afterwards that are not the first."""
    from megatron_dsv41.backends.megatron import launch

    launch.prepare_process()
    from megatron_dsv41.backends.megatron import trainer
    from megatron_dsv41.backends.megatron.reduce_room import ReduceRoom

    replaced, buckets, before = [], [], []

    class Watched(ReduceRoom):
        def watch(self, output, model):
            if not buckets:
                buckets.extend([*model.bucket_groups, *model.expert_parallel_bucket_groups])
                before.extend(_group(bucket) for bucket in buckets)
            super().watch(output, model)

        def take_back(self):
            now = [_group(bucket) for bucket in buckets]
            replaced.append(sum(a is not b for a, b in zip(now, before, strict=True)))
            assert set(now) <= set(self.narrow.values())
            super().take_back()

    created = trainer.create(tiny_run(folder, *OVERLAPPED, *overrides))
    if room:
        created.room = Watched(4, (created.groups.dp_cp, created.groups.expt_dp))
    assert created.pretrain() == 0
    moved = sum(_group(bucket) is not group for bucket, group in zip(buckets, before, strict=True))
    return replaced, len(buckets), moved, torch._C._get_sm_carveout_experimental()


def _group(bucket):
    return getattr(bucket, "intra_distributed_optimizer_instance_group", None) or bucket.data_parallel_group


@pytest.mark.parametrize("overrides", [("optimizer.name=adamw",), ("optimizer.name=published",)], ids=" ".join)
def test_sums_have_groups_of_their_own(tmp_path, overrides):
    plain, roomy = (f"checkpoint.folder={tmp_path / name}" for name in ("plain", "roomy"))
    run_ranks(train, 2, tmp_path, False, plain, *overrides)
    for replaced, buckets, moved, carved in run_ranks(train, 2, tmp_path, True, roomy, *overrides):
        assert replaced == [buckets] * 3 and buckets >= 2 and moved == 0 and carved is None
    losses = [[row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("plain", "roomy")]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
