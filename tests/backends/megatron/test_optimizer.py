"""The published optimizer in every layout: given one gradient, every parameter moves as in one process."""

import zlib

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.optim.optimizer import whole_optimizer
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

CLIP = 100.0  # the gradients below are longer: clipping takes part


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer")
    tiny_run(folder)
    return folder


def settings(home, *overrides):
    common = ("optimizer.name=published", "optimizer.lr=0.01", f"optimizer.clip={CLIP}", "phase.index_loss=sparse")
    return home, "batch.micro=1", *common, *overrides


def drawn(name, shape, salt=0):
    """The same tensor on every rank and in every layout; some rows of tables get no gradient."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + salt)
    tensor = torch.randn(shape, generator=generator)
    if salt and name.endswith("embed.weight"):
        tensor[::3] = 0
    return tensor


def built(run):
    """On a rank: the stages of a layout with drawn weights, and their optimizer."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_dsv41.backends.megatron import trainer as trainers
    from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder
    from megatron_dsv41.backends.megatron.optimizer_mixed import MegatronMixedOptimizer
    from megatron_dsv41.backends.megatron.optimizer_parts import whole_shape
    from megatron_dsv41.backends.megatron.state_dict import local_part

    trainer = trainers.create(run)
    stage = DSV41ModelBuilder(trainer.model_config).build_model(trainer.groups)
    layout = trainer.layout
    parameters = dict(stage.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local_part(drawn(name, whole_shape(parameter, layout)), parameter, layout))
    config = OptimizerConfig(optimizer="adam", lr=run.optimizer.lr, clip_grad=run.optimizer.clip)
    optimizer = MegatronMixedOptimizer(config, [stage], run, layout, trainer.groups)
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    return parameters, optimizer, layout


def stepped(run, steps, folder=None, resumed=0):
    """On a rank: take `steps` steps, or load what was saved after `resumed` and take the rest; parameters and norm."""
    from megatron.core import dist_checkpointing

    from megatron_dsv41.backends.megatron.optimizer_parts import whole_shape
    from megatron_dsv41.backends.megatron.state_dict import local_part

    parameters, optimizer, layout = built(run)
    norm = 0.0
    if resumed:
        expected = whole_steps(run, resumed)[0]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(local_part(expected[name], parameter, layout))
        loaded = dist_checkpointing.load({"optimizer": optimizer.sharded_state_dict({}, is_loading=True)}, folder)
        optimizer.load_state_dict(loaded["optimizer"])
    for step in range(resumed, steps):
        for name, parameter in parameters.items():
            whole = drawn(name, whole_shape(parameter, layout), 1 + step)
            parameter.main_grad = local_part(whole, parameter, layout).float().clone()
        _, norm, _ = optimizer.step()
    if folder and not resumed:
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save({"optimizer": optimizer.sharded_state_dict({})}, folder)
    expected, expected_norm = whole_steps(run, steps)
    worst = 0.0
    for name, parameter in parameters.items():
        part = local_part(expected[name], parameter, layout)
        worst = max(worst, float((parameter.detach() - part).abs().max() / part.abs().max()))
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    return worst


def whole_steps(run, steps):
    """One process, whole tensors, clipping by hand; parameters and the last norm."""
    from megatron_dsv41.backends.megatron.optimizer_mixed import is_buffer, optimizer_table

    shapes = {b.native: b.shape for b in bind(run.architecture()) if not is_buffer(b.native)}
    parameters = {name: drawn(name, shape) for name, shape in shapes.items()}
    optimizer = whole_optimizer(parameters, optimizer_table(run), run.optimizer)
    norm = 0.0
    for step in range(steps):
        for name, tensor in parameters.items():
            tensor.grad = drawn(name, tensor.shape, 1 + step)
        norm = float(torch.nn.utils.get_total_norm([t.grad for t in parameters.values()]))
        for tensor in parameters.values():
            tensor.grad *= min(1.0, run.optimizer.clip / (norm + 1e-6))
        optimizer.step()
    return parameters, norm


def check_layout(steps, arguments, *rest):
    return stepped(tiny_run(*arguments), steps, *rest)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "world,layout",
    [
        (1, ()),
        (2, ()),
        (2, ("parallel.tp=2",)),
        (2, ("parallel.pp=2",)),
        (2, ("parallel.ep=2",)),
        (4, ("parallel.tp=2", "parallel.sp=true")),
        (4, ("parallel.tp=2", "parallel.pp=2")),
        (4, ("parallel.tp=2", "parallel.ep=2")),
        (4, ("parallel.ep=2",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_one_gradient_one_update(home, world, layout):
    assert max(run_ranks(check_layout, world, 2, settings(home, *layout))) < 1e-5


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "first,then",
    [
        ((4, ("parallel.tp=2",)), (1, ())),
        ((1, ()), (4, ("parallel.tp=2", "parallel.ep=2"))),
        ((2, ()), (2, ("parallel.pp=2",))),
    ],
    ids=["tp2dp2-1", "1-tp2ep2", "dp2-pp2"],
)
def test_state_moves_between_layouts(home, tmp_path, first, then):
    folder = tmp_path / "state"
    run_ranks(check_layout, first[0], 2, settings(home, *first[1]), folder)
    assert max(run_ranks(check_layout, then[0], 3, settings(home, *then[1]), folder, 2)) < 1e-5
