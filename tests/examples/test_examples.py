"""The examples are what people copy: they must run as they stand."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from megatron_dsv41.cli import main
from megatron_dsv41.run_config import load_run

EXAMPLES = Path(__file__).parents[2] / "examples"


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
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    assert spec is not None and spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    quickstart.STEPS = 5
    quickstart.main()
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")]), ids=lambda path: path.name
)
def test_batch_scripts_are_valid_shell(path):
    subprocess.run(["bash", "-n", path], check=True)
