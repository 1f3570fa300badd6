"""Training runs, whole: against a plain torch loop, on two ranks, killed, stopped, and asked for nonsense."""

import logging
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.tiny_run import smooth, tiny_run

STEPS = 24


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def losses(run_folder, after=0):
    return {row["step"]: row["loss"] for row in read_metrics(run_folder) if "loss" in row and row["step"] > after}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the corpus in it."""
    folder = tmp_path_factory.mktemp("train")
    tiny_run(folder)
    return folder


def settings(home, name, *overrides):
    return (
        home,
        f"checkpoint.folder={home / name}",
        f"train.steps={STEPS}",
        "checkpoint.interval=3",
        "batch.micro=2",
        "schedule.warmup=2",
        *overrides,
    )


@pytest.fixture(scope="module")
def uninterrupted(home):
    """One process, all steps."""
    assert run_ranks(train, 1, *settings(home, "whole", "eval.interval=12")) == [0]
    return home / "whole"


def test_a_log_holds_what_we_print(home):
    """Through an evaluation and a save, as a process that nothing was imported into before."""
    overrides = ("train.steps=2", "batch.micro=4", "checkpoint.interval=2", "eval.interval=1", "eval.batches=1")
    config = home / "quiet.yaml"
    config.write_text(tiny_run(home, f"checkpoint.folder={home / 'quiet'}", *overrides).to_yaml())
    command = [sys.executable, "-m", "megatron_dsv41", "train", "--config", str(config)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "step 2  validation loss" in told.stdout and "saved step 2" in told.stdout
    assert not [line for line in told.stderr.splitlines() if "WARNING" in line or "Guessing device" in line]


def test_of_what_megatron_warns_of_that_remains_which_tells_something(capsys, recwarn):
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    from megatron_dsv41.backends.megatron.train import quiet

    with quiet(False):
        machine = RerunStateMachine(mode=RerunMode.DISABLED)
        for mode in (RerunMode.DISABLED, RerunMode.VALIDATE_RESULTS, RerunMode.DISABLED):
            machine.set_mode(mode)
        logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").warning("a checkpoint of another time")
        logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").info("a set-up line")
        compile("'\\-'", "/elsewhere/megatron/core/inference.py", "exec")
        warnings.warn("Detected a Jax installation but no library for it", RuntimeWarning, stacklevel=1)
        warnings.warn("something is wrong", RuntimeWarning, stacklevel=1)
        print("Megatron's set-up")
    assert capsys.readouterr() == (
        "",
        "WARNING megatron.core.rerun_state_machine: Setting RerunStateMachine mode RerunMode.VALIDATE_RESULTS\n"
        "WARNING megatron.core.dist_checkpointing.strategies.torch: a checkpoint of another time\n",
    )
    assert [str(warning.message) for warning in recwarn] == ["something is wrong"]


def test_loss_falls_and_everything_is_reported(uninterrupted):
    rows = read_metrics(uninterrupted)
    found = losses(uninterrupted)
    assert list(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1] - 0.3
    assert [row["step"] for row in rows if "valid_loss" in row] == [12, 24]
    assert rows[0]["tokens"] == 4 * 32 and {"lr", "grad_norm", "tokens_per_second"} <= set(rows[0])
    assert sum(key.startswith("router/entropy/") for key in rows[0]) == 8
    assert checkpoints.complete_steps(uninterrupted) == [3, 6, 9, 12, 15, 18, 21, 24]
    run = tiny_run(*settings(uninterrupted.parent, "whole"))
    expected = [run.learning_rate(step) for step in range(STEPS)]
    assert [row["lr"] for row in rows if "lr" in row] == pytest.approx(expected, rel=1e-12)


# Adam divides noise by noise where a gradient is zero but for rounding, unless eps is above that.
SMOOTH = ("optimizer.eps=1e-6", *smooth())


def plain_optimizer(run, parameters):
    """torch's AdamW, or the published updates on whole tensors; its caller sets the rates."""
    from megatron_dsv41.backends.megatron.optimizer_mixed import optimizer_table
    from megatron_dsv41.optim.groups import decays
    from megatron_dsv41.optim.optimizer import whole_optimizer

    settings = run.optimizer
    if settings.name != "adamw":
        return whole_optimizer(parameters, optimizer_table(run), settings)
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in parameters.items() if decays(n)], "weight_decay": settings.weight_decay},
            {"params": [p for n, p in parameters.items() if not decays(n)], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )


def oracle_losses(home, name, steps, *overrides):
    """Train with Megatron, then the same model with a plain torch loop on the same samples; both loss lists."""
    from megatron_dsv41.backends.megatron import trainer as trainers
    from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder
    from megatron_dsv41.modules.block import Aux
    from megatron_dsv41.modules.transformer import Transformer, next_token_loss

    run = tiny_run(*settings(home, name, f"train.steps={steps}", "optimizer.clip=0.5", *overrides))
    trainer = trainers.create(run)
    assert trainer.pretrain() == 0
    start = DSV41ModelBuilder(trainer.model_config).build_model(trainer.groups)
    oracle = Transformer(run.architecture(), trainer.corpus.token_map, phase=run.phase)
    oracle.load_state_dict(start.state_dict())
    optimizer = plain_optimizer(run, dict(oracle.named_parameters()))
    trainer.arguments.consumed_train_samples = 0
    feed, found = trainer.feeds(None)[0], []
    for step in range(steps):
        batches = [next(feed) for _ in range(run.sequences_per_step // run.batch.micro)]
        optimizer.zero_grad()
        total, loads = 0.0, 0
        for batch in batches:
            out = oracle(batch.input_ids_BS, batch.documents)
            share = batch.weight_BS.sum() / batch.step_weight
            loss = next_token_loss(out.logits, batch.labels_BS, batch.weight_BS) * share
            (loss + Aux(*out.aux).loss.sum() / len(batches)).backward()
            total, loads = total + loss.item(), loads + out.aux.expert_load
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), run.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate(step) * group.get("lr_multiplier", 1.0)
        optimizer.step()
        for layer, block in enumerate(oracle.layers):
            for bias, load in zip((block.ffn.gate.bias, block.ffn.gate.bias_vl), loads[layer], strict=True):
                bias.add_(run.phase.router_bias_speed * torch.sign(load.mean() - load))
        found.append(total)
    return list(losses(run.checkpoint.folder).values()), found


@pytest.mark.parametrize("name", ["adamw", "published"])
def test_equals_a_plain_torch_loop(home, name):
    ((megatron, oracle),) = run_ranks(oracle_losses, 1, home, f"oracle_{name}", 6, f"optimizer.name={name}", *SMOOTH)
    # Ten Newton-Schulz steps magnify the rounding of small singular values.
    assert megatron == pytest.approx(oracle, rel=1e-6 if name == "adamw" else 1e-4)


def test_two_ranks_equal_one(home):
    work = ("train.steps=5", "batch.micro=1")
    for ranks, name in ((1, "one"), (2, "two")):
        assert run_ranks(train, ranks, *settings(home, name, *work, *SMOOTH)) == [0] * ranks
    one, two = losses(home / "one"), losses(home / "two")
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-6)


def test_killed_in_a_step_it_resumes_bitwise(home, uninterrupted):
    work = settings(home, "step-killed", "eval.interval=12")
    with Ranks(train, 1, *work) as ranks:
        ranks.wait_until(lambda: 4 in losses(home / "step-killed"))
        ranks.kill()
    check_resumes(work, uninterrupted, after=3)


def test_killed_in_a_save_it_resumes_bitwise(home, uninterrupted):
    work = settings(home, "save-killed", "eval.interval=12")
    staging = home / "save-killed" / checkpoints.STAGING
    with Ranks(train, 1, *work) as ranks:
        ranks.wait_until(lambda: 5 in losses(home / "save-killed"))
        ranks.wait_until(lambda: any(staging.glob("iter_*/*")))
        ranks.kill()
    assert staging.exists() and checkpoints.complete_steps(home / "save-killed") == [3]
    check_resumes(work, uninterrupted, after=3)


def check_resumes(work, uninterrupted, after):
    folder = tiny_run(*work).checkpoint.folder
    assert checkpoints.complete_steps(folder) == [after]
    assert run_ranks(train, 1, *work) == [0]
    again, expected = losses(folder), losses(uninterrupted)
    assert len(losses(folder, after)) >= 20
    assert again == expected
    assert [r for r in read_metrics(folder) if "valid_loss" in r] == [
        r for r in read_metrics(uninterrupted) if "valid_loss" in r
    ]
    assert not (Path(folder) / checkpoints.STAGING).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_well(home, uninterrupted, number):
    name = f"stopped-{number.name}"
    work = settings(home, name, "checkpoint.interval=null")
    with Ranks(train, 2, *work, "batch.micro=1") as ranks:
        ranks.wait_until(lambda: 2 in losses(home / name))
        ranks.signal(number)
        assert ranks.results() == [0, 0]
    (step,) = checkpoints.complete_steps(home / name)
    assert step == max(losses(home / name)) < STEPS
    assert (home / name / checkpoints.TRACKER).read_text() == str(step)


def bf16_state(*work):
    """Train, then look at the parameters and the optimizer's main copies."""
    from megatron_dsv41.backends.megatron import patches
    from megatron_dsv41.backends.megatron.train import train

    seen = {}

    def keep(stock, *args, **kwargs):
        found = stock(*args, **kwargs)
        seen["model"], seen["optimizer"] = found[0][0], found[1]
        return found

    patches.HOOKS["setup_model_and_optimizer"] = "shows the test the model"
    with patches.hooked({"setup_model_and_optimizer": keep}):
        assert train(tiny_run(*work)) == 0
    module = seen["model"].module
    dtypes = {name: str(t.dtype) for name, t in module.state_dict().items()}
    return dtypes, {name: float(t.double().sum()) for name, t in module.state_dict().items()}


def test_bf16_keeps_fp32_islands_and_resumes_bitwise(home):
    work = settings(home, "bf16", "train.precision=bf16", "train.steps=6", "checkpoint.keep=1")
    ((dtypes, weights),) = run_ranks(bf16_state, 1, *work)
    fp32 = ("attn_sink", "_hc.fn", "_hc.base", "_hc.scale", "gate.bias", "gate.bias_vl")
    assert {name for name, dtype in dtypes.items() if dtype == "torch.float32"} == {
        n for n in dtypes if n.endswith(fp32)
    }
    assert {dtype for name, dtype in dtypes.items() if not name.endswith(fp32)} == {"torch.bfloat16"}
    assert checkpoints.complete_steps(home / "bf16") == [6]

    half = settings(home, "bf16-half", "train.precision=bf16", "train.steps=6")
    with Ranks(train, 1, *half) as ranks:
        ranks.wait_until(lambda: 4 in losses(home / "bf16-half"))
        ranks.kill()
    ((_, resumed),) = run_ranks(bf16_state, 1, *half)
    assert losses(home / "bf16-half") == losses(home / "bf16")
    assert resumed == weights
