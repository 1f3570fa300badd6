"""Every layout computes what the independent implementation computed, outputs and gradients."""

import json
from pathlib import Path

import pytest
import torch

from megatron_dsv41.backends.megatron.parity import parse_layout, run_layouts
from megatron_dsv41.cli import main
from megatron_dsv41.parallel.stages import layout_string
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.parity import ParityCase, compare

CASES = Path(__file__).parents[2] / "data" / "parity"
LAYERS = 8


def cut(*starts):
    """A pipeline whose stages begin at these layers."""
    edges = [0, *starts, LAYERS]
    stages = [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    return f"pp={len(stages)},layout={layout_string(stages)}"


TWO = ["tp=2", "tp=2,sp", "cp=2", "ep=2", "ep=2,dispatcher=allgather", "dp=2", "pp=2,vpp=2", "pp=2,recompute"]
TWO += ["tp=2,sp,ep=2", "tp=2,sp,etp=1", *(cut(start) for start in range(1, LAYERS))]
FOUR = ["cp=4", "ep=4", "pp=4", "pp=4,vpp=2", "tp=2,pp=2", "tp=2,sp,pp=2,vpp=2", "pp=2,ep=2", "cp=2,pp=2", "tp=2,cp=2"]
FOUR += [
    "tp=2,sp,cp=2",
    "tp=2,sp,ep=2,etp=2",
    "tp=2,sp,ep=2,dp=2",
    "cp=2,dp=2",
    "cp=2,ep=2,dp=2",
    cut(1, 3, 5),
    cut(2, 6, 7),
]
SOME = ["tp=2,sp", "cp=2", "ep=2", "pp=2", "pp=2,vpp=2"]


def check(case, world, texts):
    folder = CASES / case
    for text in texts:
        assert parse_layout(text).world_size == world, text
    found = run_ranks(run_layouts, world, str(folder), texts, timeout=600)[0]
    expected = ParityCase.load(folder)
    reports = {text: compare(expected, results) for text, results in zip(texts, found, strict=True)}
    assert {text: report.failures for text, report in reports.items() if report.failures} == {}
    return dict(zip(texts, found, strict=True))


def test_two_ranks():
    found = check("text_fp32", 2, TWO)
    plain, again = found[cut(4)], found["pp=2,recompute"]  # 8 layers on 2 stages are cut at 4
    assert plain.grads.keys() == again.grads.keys()
    for name, gradient in plain.grads.items():
        assert torch.equal(gradient, again.grads[name]), name


def test_four_ranks():
    check("text_fp32", 4, FOUR)


def test_owned_engram_tables():
    """Documents and images packed; owners on one stage, on both, and one rank each."""
    check("packed_fp32", 2, ["pp=2,vpp=2,engram=2,recompute", "cp=2,engram=2", "tp=2,sp,engram=1"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["text_fp32", "odd_length_fp32"])
def test_owned_engram_tables_in_products(case):
    layouts = ["pp=2,cp=2,engram=2", "tp=2,sp,pp=2,vpp=2,engram=4", "pp=4,engram=4", "tp=2,sp,ep=2,dp=2,engram=2"]
    check(case, 4, [*layouts, "ep=4,engram=1", "cp=2,ep=2,dp=2,engram=2", "tp=2,cp=2,engram=2", "pp=2,ep=2,engram=2"])
    check(case, 2, ["pp=2,engram=1", "tp=2,engram=2", "ep=2,engram=2"])
    check(case, 6, ["pp=2,dp=3,engram=2", "dp=6,engram=3", "pp=3,dp=2,engram=6"])


@pytest.mark.parametrize("case", ["packed_fp32", "odd_length_fp32"])
def test_packed_and_odd(case):
    check(case, 2, SOME)


def test_command_starts_the_processes_itself(capsys):
    assert main(["parity", str(CASES / "text_fp32"), "--layout", "tp=2,pp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "parallel.tp 3 does not divide o_groups"),
        ("pp=9", "8 layers cannot fill 9 pipeline stages"),
        ("tq=2", "'tq' is not an axis; did you mean tp"),
        ("tp=two", "tp needs a number"),
        ("sp", "needs parallel.tp > 1"),
        ("vpp=2", "it needs parallel.pp > 1"),
        ("engram=5000", "parallel.engram 5000 exceeds the"),
        ("pp=2,layout=tt|tt", "cannot be read"),
    ],
)
def test_impossible_layouts(layout, message, capsys):
    assert main(["parity", str(CASES / "text_fp32"), "--layout", layout]) == 2
    assert message in capsys.readouterr().err
