"""The indexers' objective in whole runs: scaled once whatever the layout, reported per layer, off without a trace."""

import pytest

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

# A weight that lets the indexers' gradients decide the reported norm: AdamW alone would hide a wrong scale.
COMMON = (
    "phase.index_loss_weight=300",
    "phase.window_kv_fp8=false",
    "phase.main_kv_fp4=false",
    "phase.index_mxfp4=false",
    "optimizer.eps=1e-8",
    "optimizer.clip=0",
    "batch.micro=1",
    "train.steps=2",
    "logging.index_probes=32",  # every query, however the sequence is cut
)
LAYOUTS = {
    "tp2": ("dense", "parallel.tp=2", "parallel.sp=true"),
    "cp2": ("dense", "parallel.cp=2"),
    "pp2": ("sparse", "parallel.pp=2", "train.recompute=block"),
    "dp2": ("sparse",),
}


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def run(home, name, world, objective, *overrides):
    there = (f"checkpoint.folder={home / name}", f"phase.index_loss={objective}")
    assert run_ranks(train, world, home, *COMMON, *there, *overrides) == [0] * world
    return read_metrics(home / name)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objective")
    tiny_run(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(home):
    return {objective: run(home, objective, 1, objective) for objective in ("dense", "sparse")}


def of_indexers(row):
    return {key: value for key, value in row.items() if key.startswith("index_")}


def test_every_layer_reports(one_process):
    row = one_process["sparse"][0]
    kinds = {"index_kl", "index_recall", "index_mass"}
    assert set(of_indexers(row)) == {f"{kind}/{layer}" for kind in kinds for layer in (2, 4, 6)} | {"index_overlap/6"}
    assert all(0 < row[f"index_recall/{layer}"] < 1 and row[f"index_kl/{layer}"] > 0 for layer in (2, 4, 6))
    assert row["grad_norm"] > 3 * row["loss"]  # what the next test compares is the indexers'


@pytest.mark.parametrize("name", ["tp2", "cp2", "pp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_layouts_agree(home, one_process, name):
    objective, *layout = LAYOUTS[name]
    rows = run(home, name, 2, objective, *layout)
    for row, expected in zip(rows, one_process[objective], strict=True):
        compared = {key: row[key] for key in ("loss", "grad_norm", *of_indexers(expected)) if key in row}
        assert compared == pytest.approx({key: expected[key] for key in compared}, rel=2e-4)
        missing = set(of_indexers(expected)) - set(compared)
        # What was selected before is not known to a stage that does not hold that layer.
        assert missing <= {"index_overlap/6"}


def test_off_leaves_no_trace(home):
    rows = run(home, "off", 1, "off")
    assert not any(key.startswith("index_kl") for row in rows for key in row)
