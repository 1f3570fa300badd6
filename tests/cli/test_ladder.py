"""`dsv41 ladder` on a real ladder of the smallest cells: plan, kill, resume, skip, collect."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_dsv41.cli import main
from megatron_dsv41.cli.plan import plan_report
from megatron_dsv41.experiments import ladder_run, ladder_state
from megatron_dsv41.experiments.ladder import load_ladder
from megatron_dsv41.experiments.ladder_cells import plan_cells
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.tiny_run import VOCABULARY, write_corpus

RULES = {
    "width_per_layer": 4,
    "width_multiple": 8,
    "head_dim": 32,
    "rope_head_dim": 8,
    "query_width": 2,
    "o_groups": 2,
    "expert_width": 0.5,
    "experts": 4,
    "experts_per_token": 2,
    "window": 8,
    "index_head_dim": 32,
    "index_topk": 4,
    "pool_blocks": 3,
    "pool_block_size": 4,
    "engram_rows": 0.5,
    "engram_heads": 2,
    "engram_head_dim": 32,
    "lr": 3e-3,
    "lr_at_depth": 8,
    "batch_tokens": 256,
    "batch_exponent": 0,
    "evals": 2,
    "checkpoints": 4,
}


@pytest.fixture(scope="module")
def ladder_file(tmp_path_factory):
    home = tmp_path_factory.mktemp("ladder")
    for seed, name in enumerate(("train", "valid")):
        write_corpus(home / name, seed=seed)
    content = {
        "name": "smallest",
        "folder": str(home / "ladder"),
        "depths": [8],
        "tokens_per_parameter": [0.06],
        "seeds": [1, 2],
        "rules": RULES,
        "base": {
            "model": {
                "preset": "tiny",
                "overrides": {
                    "vocab_size": VOCABULARY,
                    "engram_compressed_vocab_size": VOCABULARY,
                    "image_token_id": VOCABULARY - 1,
                },
            },
            "data": {"train": str(home / "train"), "valid": str(home / "valid"), "seq_length": 32},
            "batch": {"micro": 8},
            "train": {"precision": "fp32"},
            "logging": {"interval": 1, "wandb": "offline"},
        },
    }
    file = home / "ladder.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def output(capsys, *arguments):
    capsys.readouterr()
    assert main(["ladder", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_starts_nothing(ladder_file, capsys):
    report = output(capsys, "plan", ladder_file)
    assert [row["cell"] for row in report["cells"]] == ["base-d8-x0.06-s1", "base-d8-x0.06-s2"]
    assert not (ladder_file.parent / "ladder").exists()
    assert main(["ladder", "plan", str(ladder_file)]) == 0
    assert "full1+pool" in capsys.readouterr().out


def test_the_plan_counts_the_state_of_the_optimizer_that_is_set(ladder_file, tmp_path, capsys):
    """The bytes of each cell are those that `dsv41 plan` finds for its run."""
    arms = {
        "muon": {"overrides": {"optimizer.name": "published"}},
        "half": {"overrides": {"optimizer.name": "published", "optimizer.momentum_dtype": "bfloat16"}},
    }
    content = yaml.safe_load(ladder_file.read_text()) | {"seeds": [1], "arms": arms, "hardware": {"ranks": 2}}
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(content))
    report = output(capsys, "plan", tmp_path / "arms.yaml")
    found = {cell["arm"]: cell["memory_bytes"] for cell in report["cells"]}
    cells = plan_cells(load_ladder(tmp_path / "arms.yaml"))
    assert found == {cell.cell.arm: plan_report(cell.run, 2)["memory"]["largest"] for cell in cells}
    assert found["half"] < found["muon"] < found["base"]


def test_a_slurm_script_per_unfinished_cell(ladder_file, capsys):
    assert main(["ladder", "run", str(ladder_file), "--slurm", "--cells", "*-s2"]) == 0
    (script,) = capsys.readouterr().out.split()
    text = Path(script).read_text()
    assert "--cells base-d8-x0.06-s2 --launcher srun" in text
    assert "#SBATCH --dependency=singleton" in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_no_script_for_finished_cells_is_said(ladder_file, monkeypatch, capsys):
    status = ladder_state.CellStatus(ladder_state.State.FINISHED, 8, 8, 1.0, None)
    monkeypatch.setattr(ladder_state, "status_of", lambda planned: status)
    assert main(["ladder", "run", str(ladder_file), "--slurm"]) == 0
    assert capsys.readouterr() == ("", "all 2 cells are finished: no script is written\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--submit"], "--submit sends the scripts of --slurm"),
        (["--slurm", "--slots", "2"], "no --slots, no --launcher"),
        (["--slurm", "--launcher", "srun"], "no --slots, no --launcher"),
        (["--slots", "0"], "--slots must be at least 1, got 0"),
    ],
)
def test_options_that_would_not_be_read_start_nothing(ladder_file, monkeypatch, capsys, options, words):
    monkeypatch.setattr(ladder_run.Runner, "run", lambda self, cells: pytest.fail("started"))
    assert main(["ladder", "run", str(ladder_file), *options]) == 2
    assert words in capsys.readouterr().err


def test_nothing_collected_is_said_once(ladder_file, capsys):
    output(capsys, "collect", ladder_file)
    for action in ("fit", "predict", "plot"):
        assert main(["ladder", action, str(ladder_file)]) == 2
        assert "has no finished cell: run dsv41 ladder run, then collect" in capsys.readouterr().err


@pytest.fixture
def machines(monkeypatch):
    """Those that `ladder run` would run cells on."""
    made = []

    class Recorded:
        def __init__(self, ladder, machine, **rest):
            made.append(machine)

        def run(self, cells):
            return []

    monkeypatch.setattr(ladder_run, "Runner", Recorded)
    return made


def test_slots_are_at_least_one_and_at_most_the_cells(ladder_file, capsys, machines, monkeypatch):
    """Two cells on two GPUs share none, however many slots there are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for slots in ([], ["--slots", "1"], ["--slots", "8"]):
        assert main(["ladder", "run", str(ladder_file), *slots]) == 0
    assert [machine.slots for machine in machines] == [2, 1, 2]
    assert main(["ladder", "run", str(ladder_file), "--slots", "0"]) == 2
    assert "--slots must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(("visible", "devices"), [("", ()), ("-1", ()), ("1, 0", ("1", "0")), ("2,-1,0", ("2",))])
def test_gpus_are_those_that_cuda_sees(ladder_file, machines, monkeypatch, visible, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["ladder", "run", str(ladder_file), "--slots", "1"]) == 0
    assert machines[0].devices == devices


def test_no_such_cell(ladder_file, capsys):
    assert main(["ladder", "run", str(ladder_file), "--cells", "d9*"]) == 2
    assert "no cell matches" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_twice_every_cell_is_trained_once(ladder_file, capsys):
    cells = ladder_file.parent / "ladder" / "cells"
    first, second = cells / "base-d8-x0.06-s1", cells / "base-d8-x0.06-s2"

    # The runner alone dies: its trainer saves and stops by itself.
    runner = start(ladder_file)
    (trainer,) = wait_for(runner, first, 3)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    assert trainer.wait(600) is not None or not trainer.is_running()
    assert states(ladder_file, capsys) == ["interrupted", "missing"]
    stopped_at = read_metrics(first)[-1]["step"]
    wandb_id = (first / "wandb_run_id").read_text()

    # Everything dies, in the middle of the second cell.
    runner = start(ladder_file)
    (trainer,) = wait_for(runner, second, 9)
    for process in (runner, trainer):
        os.kill(process.pid, signal.SIGKILL)
    runner.wait()
    trainer.wait(600)  # a killed process is still listed until it is gone
    assert states(ladder_file, capsys) == ["finished", "interrupted"]

    assert subprocess.run(command(ladder_file), timeout=900).returncode == 0
    assert states(ladder_file, capsys) == ["finished", "finished"]
    log = (ladder_file.parent / "ladder" / "logs" / "base-d8-x0.06-s1.log").read_text()
    assert log.count("from scratch") == 1 and f"from step {stopped_at}" in log
    for folder in (first, second):
        steps = [row["step"] for row in read_metrics(folder) if "loss" in row]
        assert steps == list(range(1, max(steps) + 1))  # no step twice, none lost
    assert (first / "wandb_run_id").read_text() == wandb_id

    # Again: nothing is trained.
    before = (first / "metrics.jsonl").stat().st_mtime_ns
    done = subprocess.run(command(ladder_file), capture_output=True, text=True, timeout=900)
    assert done.stdout.count("finished, skipped") == 2
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before

    rows = output(capsys, "collect", ladder_file)["rows"]
    assert [row["cell"] for row in rows] == [first.name, second.name]
    assert rows[0]["config_digest"] != rows[1]["config_digest"]  # seeds
    assert rows[0]["data_digest"] == rows[1]["data_digest"] != ""
    assert rows[0]["wandb_id"] == wandb_id
    assert 1 < rows[0]["loss"] < 5

    changed = yaml.safe_load(ladder_file.read_text())
    changed["rules"]["lr"] = 1e-3
    other = ladder_file.with_name("changed.yaml")
    other.write_text(yaml.safe_dump(changed))
    (first / "metrics.jsonl").unlink()  # as if it were not finished
    assert main(["ladder", "run", str(other), "--cells", first.name]) == 2
    assert "was started with config_digest" in capsys.readouterr().err


def command(file):
    return [sys.executable, "-m", "megatron_dsv41", "ladder", "run", str(file)]


def start(file):
    return subprocess.Popen(command(file), env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for(runner, folder, step):
    """The trainers under `runner`, once the cell in `folder` has logged `step`."""
    end = time.monotonic() + 900
    while time.monotonic() < end and runner.poll() is None:
        if max((row["step"] for row in read_metrics(folder)), default=0) >= step:
            children = psutil.Process(runner.pid).children()
            return [child for child in children if "train" in child.cmdline()]
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner.pid, signal.SIGTERM)
    raise AssertionError(f"{folder.name} did not reach step {step}")


def states(file, capsys):
    return [cell["state"] for cell in output(capsys, "status", file)["cells"]]
