"""The examples are what people copy: they must run as they stand."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from megatron_dsv41.cli import main
from megatron_dsv41.run_config import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_run_files_can_be_planned(path, capsys):
    run = load_run(path)
    assert run.steps > 0
    assert main(["plan", str(path), "--ranks", "2"]) == 0
    assert f"{run.steps:,} steps" in capsys.readouterr().out


def test_the_demo_has_every_mechanism_alive():
    config = load_run(EXAMPLES / "demo.yaml").architecture()
    assert set(config.backbone_ratios) == {0, 1, 2}
    assert config.candidate_source_layer_id >= 0
    assert len(config.engram_layer_ids) == 2
    assert config.candidate_topk_blocks * config.candidate_block_size < load_run(EXAMPLES / "demo.yaml").data.seq_length


def test_quickstart_learns(capsys):
    quickstart = example("quickstart")
    quickstart.STEPS = 5
    quickstart.main()
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5


def test_the_demo_ends_where_a_step_fails(capfd):
    with pytest.raises(SystemExit, match="the step above ended with status 2"):
        example("demo").command("plan", EXAMPLES / "demo.yaml", "train.stepz=1")
    assert "Traceback" not in capfd.readouterr().err


def test_pretrain_alone_says_how_it_is_started(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py"])
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node=8 examples/pretrain.py"):
        example("pretrain").main()


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")]), ids=lambda path: path.name
)
def test_batch_scripts_are_valid_shell(path):
    subprocess.run(["bash", "-n", path], check=True)
