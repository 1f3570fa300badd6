"""Between two phases of a run nothing of the first one's model may stay."""

import weakref

import pytest

from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run


def watch(created, found):
    """Let the trainer put references to the parameters that it trains into `found`."""
    build = created.build_optimizer

    def watched(stock, config, model, **kwargs):
        found.extend(weakref.ref(p) for stage in model for p in stage.parameters())
        return build(stock, config, model, **kwargs)

    created.build_optimizer = watched


def parameters_left(folder, *overrides):
    """On a rank: parameters before and after a training was let go."""
    from megatron_dsv41.backends.megatron import launch, trainer

    created, found = trainer.create(tiny_run(folder, "train.steps=2", *overrides)), []
    watch(created, found)
    assert created.pretrain() == 0
    before = sum(ref() is not None for ref in found)
    created.let_go()
    del created
    launch.release()
    return before, sum(ref() is not None for ref in found)


@pytest.mark.parametrize("name", ["adamw", "published"])
def test_a_model_is_freed(tmp_path, name):
    ((before, after),) = run_ranks(parameters_left, 1, tmp_path, f"optimizer.name={name}")
    assert before > 100
    assert after == 0
