"""The published optimizer in every layout: given one gradient, every parameter moves as in one process."""

import json
import subprocess
import zlib

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.checkpoint.mapping import bind, parameter_bindings
from megatron_dsv41.cli import main
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.optim.optimizer import whole_optimizer
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.layouts import CURVES, SHORT_CURVES
from megatron_dsv41.testing.tiny_run import smooth, tiny_run

SMOOTH = smooth()
CLIP = 100.0  # the gradients below are longer: clipping takes part


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer")
    tiny_run(folder)
    return folder


def settings(home, *overrides):
    # At rate 1 an update is as large as a weight: rounding of the sum hides nothing of it.
    common = ("optimizer.name=published", "optimizer.lr=1.0", f"optimizer.clip={CLIP}", "phase.index_loss=sparse")
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
    builder, virtual = DSV41ModelBuilder(trainer.model_config), range(run.parallel.vpp)
    stages = [builder.build_model(trainer.groups, vp_stage=stage) for stage in virtual]
    layout = trainer.layout
    parameters = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(local_part(drawn(name, whole_shape(parameter, layout)), parameter, layout))
    config = OptimizerConfig(optimizer="adam", lr=run.optimizer.lr, clip_grad=run.optimizer.clip)
    optimizer = MegatronMixedOptimizer(config, stages, run, layout, trainer.groups)
    for group in optimizer.param_groups:
        group["lr"] = run.optimizer.lr * group["max_lr"]
    return parameters, optimizer, layout


def stepped(run, steps, folder=None, resumed=0):
    """On a rank: take `steps` steps, or load what was saved after `resumed` and take the rest.

    Largest deviation from one process, over the largest element of what the last step moved, of any parameter.
    """
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
    before, (expected, expected_norm) = whole_steps(run, steps - 1)[0], whole_steps(run, steps)
    worst = 0.0
    for name, parameter in parameters.items():
        part, moved = local_part(expected[name], parameter, layout), expected[name] - before[name]
        worst = max(worst, float((parameter.detach() - part).abs().max() / moved.abs().max()))
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    return worst


def whole_steps(run, steps):
    """One process, whole tensors, clipping by hand; parameters and the last norm."""
    from megatron_dsv41.backends.megatron.optimizer_mixed import optimizer_table

    shapes = {b.native: b.shape for b in parameter_bindings(run.architecture())}
    parameters = {name: drawn(name, shape) for name, shape in shapes.items()}
    optimizer = whole_optimizer(parameters, optimizer_table(run), run.optimizer)
    norm = 0.0
    for step in range(steps):
        for name, tensor in parameters.items():
            tensor.grad = drawn(name, tensor.shape, 1 + step)
        norm = float(torch.nn.utils.get_total_norm([t.grad for t in parameters.values()]))
        for tensor in parameters.values():
            tensor.grad.mul_(min(1.0, run.optimizer.clip / (norm + 1e-6)))
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
        (2, ("parallel.cp=2",)),
        (2, ("parallel.pp=2", "parallel.vpp=2")),
        (2, ("parallel.tp=2", "parallel.etp=2")),
        (4, ("parallel.tp=2", "parallel.sp=true")),
        (4, ("parallel.tp=2", "parallel.pp=2")),
        (4, ("parallel.tp=2", "parallel.sp=true", "parallel.ep=2")),
        (4, ("parallel.ep=2",)),
        pytest.param(4, ("parallel.pp=4",), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.ep=4",), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.tp=2", "parallel.cp=2"), marks=pytest.mark.slow),
        pytest.param(
            4, ("parallel.tp=2", "parallel.sp=true", "parallel.ep=2", "parallel.etp=2"), marks=pytest.mark.slow
        ),
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
        ((1, ()), (4, ("parallel.tp=2", "parallel.sp=true", "parallel.ep=2"))),
        ((2, ()), (2, ("parallel.pp=2",))),
        ((3, ("batch.sequences=6",)), (1, ())),  # a rank owns several parts of one parameter
    ],
    ids=["tp2dp2-1", "1-tp2ep2", "dp2-pp2", "dp3-1"],
)
def test_state_moves_between_layouts(home, tmp_path, first, then):
    folder = tmp_path / "state"
    run_ranks(check_layout, first[0], 2, settings(home, *first[1]), folder)
    assert max(run_ranks(check_layout, then[0], 3, settings(home, *then[1]), folder, 2)) < 1e-5


def held(arguments):
    """On a rank: bytes of moments and fp32 copies that its optimizer keeps."""
    _, optimizer, _ = built(tiny_run(*arguments))
    moments = [optimizer.optimizer.state[tensor] for _, tensor in optimizer.mine]
    state = sum(value.nbytes for moment in moments for name, value in moment.items() if name != "step")
    return state + sum(t.nbytes for part, t in optimizer.mine if part.parameter.dtype is not torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "layout",
    [("train.precision=bf16", "optimizer.momentum_dtype=bfloat16"), ("parallel.pp=2",), ("parallel.tp=2",)],
    ids=["dp2", "pp2", "tp2"],
)
def test_state_is_as_large_as_the_plan_says(home, tmp_path, layout, capsys):
    """A rank holds about its stage's memory; where no tensor is kept twice, all ranks the table's bytes exactly."""
    arguments = settings(home, *layout)
    (tmp_path / "run.yaml").write_text(tiny_run(*arguments).to_yaml())
    assert main(["plan", str(tmp_path / "run.yaml"), "--ranks", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found, stages = run_ranks(held, 2, arguments), [stage["optimizer"] for stage in report["memory"]["stages"]]
    table = sum(group["state_bytes"] * group["parameters"] for group in report["optimizer"])
    assert sum(found) == table or "parallel.tp=2" in layout
    assert found == pytest.approx(stages * (2 // len(stages)), rel=0.05)


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def run_settings(home, name, *overrides):
    common = ("train.steps=4", "checkpoint.interval=2", "batch.micro=1", "batch.sequences=4", "schedule.warmup=1")
    return home, f"checkpoint.folder={home / name}", *common, *overrides


def stored(folder, step):
    """Everything in a checkpoint, model and optimizer, by key."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    return load_plain_tensors(str(checkpoints.checkpoint_path(folder, step)))


def compare_checkpoints(one, two, step):
    """On a rank: keys where two checkpoints differ, by bits."""
    one, two = stored(one, step), stored(two, step)
    assert set(one) == set(two)
    tensors = [key for key in one if isinstance(one[key], torch.Tensor)]
    assert {"norm.weight", "head.weight", "layers.2.ffn.gate.bias", "optimizer.momentum.embed.weight"} <= set(tensors)
    return [key for key in tensors if not torch.equal(one[key], two[key])]


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("fp32", "dp=2"),
        ("bf16", "dp=2"),
        *(pytest.param("bf16", name, marks=pytest.mark.slow) for name in SHORT_CURVES if name != "pp=2"),
    ],
)
def test_resume_is_bitwise(home, precision, layout):
    overrides = ("optimizer.name=published", f"train.precision={precision}", "optimizer.momentum_dtype=bfloat16")
    overrides += CURVES[layout][1] if layout != "dp=2" else ()
    kind = layout.translate(str.maketrans("=,", "__"))
    whole, halved = f"whole_{precision}_{kind}", f"halved_{precision}_{kind}"
    assert run_ranks(train, 2, *run_settings(home, whole, *overrides)) == [0, 0]
    (home / halved).mkdir()
    for name in ("iter_0000002", "run.yaml"):
        subprocess.run(["cp", "-r", home / whole / name, home / halved / name], check=True)
    assert run_ranks(train, 2, *run_settings(home, halved, *overrides)) == [0, 0]
    assert run_ranks(compare_checkpoints, 1, home / whole, home / halved, 4) == [[]]
    rows = [
        {row["step"]: row["loss"] for row in read_metrics(home / name) if "loss" in row} for name in (whole, halved)
    ]
    assert rows[0][3] == rows[1][3] and rows[0][4] == rows[1][4]


def check_curves(home, layouts, prefix="curve"):
    rows = []
    for number, (world, overrides) in enumerate(layouts):
        name = f"{prefix}_{number}"
        assert (
            run_ranks(train, world, *run_settings(home, name, "optimizer.name=published", *SMOOTH, *overrides))
            == [0] * world
        )
        rows.append([row["loss"] for row in read_metrics(home / name) if "loss" in row])
    return rows


def test_curves_of_layouts_agree(home):
    overlap, tensor = ("megatron.overlap-grad-reduce=true",), ("parallel.tp=2",)
    one, data, overlapped, split = check_curves(home, [(1, ()), (2, ()), (2, overlap), (2, tensor)])
    assert data == pytest.approx(one, rel=1e-4)
    assert overlapped == data
    assert split == pytest.approx(one, rel=1e-2)


@pytest.mark.slow
def test_curves_of_every_layout_agree(home):
    one, *others = check_curves(home, [(1, ()), *CURVES.values()], "every")
    for name, found in zip(CURVES, others, strict=True):
        print(f"{name}: {max(abs(a / b - 1) for a, b in zip(found, one, strict=True)):.1e}")
        assert found == pytest.approx(one, rel=1e-2), name


def test_state_of_another_optimizer_is_refused(home):
    (home / "other" / "iter_0000002").mkdir(parents=True)
    for name in (".metadata", "metadata.json"):
        (home / "other" / "iter_0000002" / name).touch()
    (home / "other" / "iter_0000002" / checkpoints.MANIFEST).write_text("{}")  # whole, as far as its list of files goes
    run = tiny_run(*run_settings(home, "other"))
    (home / "other" / "run.yaml").write_text(run.to_yaml())
    with pytest.raises(
        AssertionError, match="was trained with optimizer.name=adamw, whose state optimizer.name=published"
    ):
        run_ranks(train, 1, *run_settings(home, "other", "optimizer.name=published"))


def frozen_parts(folder, names):
    """On a rank: which of these tensors stay equal between steps 2 and 4. Router biases must be fp32 and move."""
    early, late = stored(folder, 2), stored(folder, 4)
    biases = [late[name] for name in names if name.endswith(".gate.bias")]
    assert biases and all(bias.dtype is torch.float32 and bias.abs().max() > 0 for bias in biases)
    return {name for name in names if torch.equal(early[name], late[name])}


def moved(folder, pattern, first, then):
    """On a rank: whether tensors under a prefix differ between two steps, weight and momentum alike."""
    early, late = stored(folder, first), stored(folder, then)
    names = [name for name in early if name.removeprefix("optimizer.momentum.").startswith(pattern)]
    assert any(name.startswith("optimizer.") for name in names)
    return {not torch.equal(early[name], late[name]) for name in names}


def test_thawed_parameters_move_from_where_they_stood(home):
    frozen, overrides = "optimizer.frozen=[layers.5.attn.w*]", ("optimizer.name=published",)
    assert run_ranks(train, 1, *run_settings(home, "thawed", *overrides, frozen, "train.steps=2")) == [0]
    assert run_ranks(train, 1, *run_settings(home, "thawed", *overrides)) == [0]
    assert run_ranks(moved, 1, home / "thawed", "layers.5.attn.w", 2, 4) == [{True}]


@pytest.mark.parametrize("name", ["published", "adamw"])
def test_frozen_parameters_do_not_move(home, name):
    overrides = (f"optimizer.name={name}", "optimizer.frozen=[layers.5.attn.*]")
    assert run_ranks(train, 1, *run_settings(home, f"frozen_{name}", *overrides)) == [0]
    names = {b.native for b in bind(tiny_run(home).architecture())}
    (same,) = run_ranks(frozen_parts, 1, home / f"frozen_{name}", names)
    still = {name for name in names if ".indexer." in name or name.startswith("layers.5.attn.")}
    assert same == still | {name for name in names if name.endswith(".gate.bias_vl")}  # the corpus has no images
