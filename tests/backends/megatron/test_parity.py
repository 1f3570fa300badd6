"""Every layout computes what the independent implementation computed, outputs and gradients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv41.backends.megatron.parity import parse_layout, run_layouts
from megatron_dsv41.cli import main
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.layouts import FOUR_CUTS, FOUR_RANKS, SAMPLE, SAMPLE_CUTS, TWO_CUTS, TWO_RANKS, cut
from megatron_dsv41.testing.parity import ParityCase, compare

CASES = Path(__file__).parents[2] / "data" / "parity"


def check(case, world, texts, record=lambda *what: None):
    folder = CASES / case
    for text in texts:
        assert parse_layout(text).world_size == world, text
    found = run_ranks(run_layouts, world, str(folder), texts, timeout=600)[0]
    expected = ParityCase.load(folder)
    reports = {text: compare(expected, results) for text, results in zip(texts, found, strict=True)}
    assert {text: report.failures for text, report in reports.items() if report.failures} == {}
    for text in texts:
        record("parity", f"{case} {text}")  # what tools/support_matrix.py reads
    return dict(zip(texts, found, strict=True))


def test_two_ranks(record_property):
    found = check("text_fp32", 2, TWO_RANKS + TWO_CUTS, record_property)
    plain = found[cut(4)]  # 8 layers on 2 stages are cut at 4
    for text in ("pp=2,recompute", "pp=2,recompute=selective", "pp=2,recompute=full"):
        again = found[text]
        assert plain.grads.keys() == again.grads.keys()
        for name, gradient in plain.grads.items():
            assert torch.equal(gradient, again.grads[name]), (text, name)


def test_four_ranks(record_property):
    check("text_fp32", 4, FOUR_RANKS + SAMPLE_CUTS, record_property)


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
def test_packed_and_odd(case, record_property):
    check(case, 2, SAMPLE, record_property)


@pytest.mark.slow
def test_every_cut_into_four(record_property):
    check("text_fp32", 4, FOUR_CUTS, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packed_fp32", "odd_length_fp32"])
def test_packed_and_odd_in_every_layout(case, record_property):
    check(case, 2, TWO_RANKS + TWO_CUTS, record_property)
    check(case, 4, FOUR_RANKS + SAMPLE_CUTS, record_property)


def test_command_starts_the_processes_itself(capsys):
    assert main(["parity", str(CASES / "text_fp32"), "--layout", "tp=2,pp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"] is True


@pytest.mark.ranks(2)
def test_command_prints_nothing_of_megatrons():
    """As a process that nothing was imported into before."""
    command = [sys.executable, "-m", "megatron_dsv41", "parity", str(CASES / "text_fp32"), "--layout", "pp=2"]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert told.stdout.split("\n")[0].strip() == "parity: text_fp32, pp=2 (float32)"
    assert told.stdout.endswith("within tolerance\n") and told.stderr == ""


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "parallel.tp 3 does not divide o_groups"),
        ("pp=9", "8 layers cannot fill 9 pipeline stages"),
        ("tq=2", "'tq' is not an axis; did you mean tp"),
        ("tp=two", "tp needs a number"),
        ("sp", "needs parallel.tp > 1"),
        ("ep=2,dispatcher=flex", "parallel.dispatcher flex runs on DeepEP"),
        ("recompute=all", "recompute must be one of none, selective, block, full"),
        ("vpp=2", "it needs parallel.pp > 1"),
        ("engram=5000", "parallel.engram 5000 exceeds the"),
        ("pp=2,layout=tt|tt", "cannot be read"),
    ],
)
def test_impossible_layouts(layout, message, capsys):
    assert main(["parity", str(CASES / "text_fp32"), "--layout", layout]) == 2
    assert message in capsys.readouterr().err
