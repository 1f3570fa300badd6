"""Recipes: complete, plannable, and changed by the file that names one."""

import json

import pytest

from megatron_dsv41.cli import main
from megatron_dsv41.recipes import RECIPES
from megatron_dsv41.run_config import run_from_dict

FILE = {
    "model": {"preset": "flash"},
    "data": {"train": "corpus"},
    "checkpoint": {"folder": "run"},
}


def make(recipe, *overrides, **sections):
    return run_from_dict({"recipe": recipe, **FILE, **sections}, overrides)


def test_the_published_pretraining():
    run = make("pretrain-flash")
    short, long = run.legs
    assert run.steps * run.tokens_per_step == pytest.approx(45e12, rel=1e-5) and run.tokens_per_step == 100_663_296
    assert (short.run.data.seq_length, short.run.sequences_per_step) == (65536, 1536)
    assert (long.run.data.seq_length, long.run.sequences_per_step) == (1048576, 96)
    assert long.start * run.tokens_per_step == pytest.approx(34e12, rel=1e-5)
    at = lambda tokens: run.learning_rate(int(tokens / run.tokens_per_step))  # noqa: E731
    assert [at(t) for t in (1e12, 27.9e12, 40.1e12, 45e12)] == pytest.approx([2.6e-4, 2.6e-4, 2.6e-5, 2.6e-5])
    assert not run.phase.hsi and not run.phase.main_kv_fp4 and run.phase.index_loss == "sparse"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_plan(recipe, capsys):
    assert main(["plan", "--recipe", recipe, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    phases = report["phases"]
    assert [phase["name"] for phase in phases] == [entry["name"] for entry in RECIPES[recipe]["phases"]]
    assert phases[0]["steps"][0] == 1 and phases[-1]["steps"][1] == report["schedule"]["steps"]
    tokens = {phase["seq_length"] * phase["sequences"] for phase in phases}
    assert tokens == {report["schedule"]["tokens_per_step"]}  # the batch in tokens is constant
    for phase in phases:  # and so are the tokens of one rank
        assert phase["seq_length"] / phase["layout"]["context"] == 65536


def test_the_table_of_phases(capsys):
    assert main(["plan", "--recipe", "pretrain-flash"]) == 0
    rows = capsys.readouterr().out.splitlines()
    (row,) = (row.split() for row in rows if row.startswith("1m "))
    assert "1,048,576 x 96" in " ".join(row) and "cp16" in row and "data.seq_length=1048576" in row


def test_the_file_lies_above_the_recipe():
    run = make("anneal", "phases.0.tokens=2e11", "recipe=long-context", optimizer={"lr": 1e-5}, phase={"hsi": True})
    assert [leg.name for leg in run.legs] == ["256k", "1m"] and run.phases[0].tokens == 200_000_000_000
    assert run.optimizer.lr == 1e-5 and run.optimizer.name == "published" and run.phase.hsi
    assert run.phase.index_loss == "sparse"
    own = make("anneal", phases=[{"name": "mine", "steps": 3}])
    assert [leg.name for leg in own.legs] == ["mine"]
    assert "recipe" not in run.to_dict() and run_from_dict(run.to_dict()) == run


def test_an_unknown_recipe_is_named():
    with pytest.raises(ValueError, match="recipe 'aneal' does not exist; did you mean anneal"):
        make("aneal")
