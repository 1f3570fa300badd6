import json
from pathlib import Path

import pytest

from megatron_dsv41.cli.plan import layout_of
from megatron_dsv41.experiments.collect import collect
from megatron_dsv41.experiments.flops import flops_per_token
from megatron_dsv41.experiments.ladder import Ladder, load_ladder
from megatron_dsv41.experiments.ladder_cells import cells_of, plan_cells
from megatron_dsv41.experiments.ladder_plan import check_sharing, describe_ladder
from megatron_dsv41.experiments.ladder_run import Machine, Runner
from megatron_dsv41.experiments.ladder_state import start_record
from megatron_dsv41.run_config import load_run
from megatron_dsv41.typed_yaml import build

EXAMPLES = Path(__file__).parents[2] / "examples" / "ladder"
SMALL = {
    "width_per_layer": 4,
    "width_multiple": 8,
    "head_dim": 32,
    "rope_head_dim": 16,
    "o_groups": 2,
    "experts": 4,
    "experts_per_token": 2,
    "engram_rows": 1,
    "engram_heads": 2,
    "engram_head_dim": 32,
    "batch_tokens": 2048,
    "batch_at_tokens": 1e6,
}
FILE = {
    "name": "small",
    "folder": "runs/small",
    "depths": [8, 12],
    "tokens_per_parameter": [1, 2],
    "seeds": [1, 2],
    "base": {
        "model": {"preset": "tiny"},
        "data": {"train": "a", "valid": "b", "seq_length": 128},
        "batch": {"micro": 2},
        "train": {"precision": "fp32"},
    },
    "rules": SMALL,
}


def ladder(**changes) -> Ladder:
    return build(Ladder, FILE | changes)


def test_the_grid_is_depth_by_tokens_by_seed():
    assert [cell.id for cell in cells_of(ladder(depths=[12, 8], tokens_per_parameter=[2]))] == [
        "base-d8-x2-s1",
        "base-d8-x2-s2",
        "base-d12-x2-s1",
        "base-d12-x2-s2",
    ]


def test_arms_change_runs_and_rules_on_a_part_of_the_grid():
    arms = {
        "published": {"overrides": {"optimizer.name": "published"}, "depths": [8], "seeds": [1]},
        "one-stream": {"rules": {"streams": 1}, "tokens_per_parameter": [2]},
    }
    cells = {cell.id: cell for cell in plan_cells(ladder(arms=arms))}
    assert len(cells) == 8 + 2 + 4
    assert cells["published-d8-x1-s1"].run.optimizer.name == "published"
    assert cells["base-d8-x1-s1"].run.optimizer.name == "adamw"
    assert cells["one-stream-d12-x2-s2"].run.architecture().hc_mult == 1


def test_iso_flop_cells_spend_their_budget():
    planned = plan_cells(ladder(tokens_per_parameter=[], iso_flops={"budgets": [1e12, 4e12]}, seeds=[1]))
    assert len(planned) == 4
    for cell in planned:
        run = cell.run
        flops = run.steps * run.tokens_per_step * flops_per_token(run.architecture(), 128, run.phase).training_total
        one_round = 4 * run.tokens_per_step / (run.steps * run.tokens_per_step)  # rounded up to the validation points
        assert 1 <= flops / cell.cell.size <= 1 + one_round


def test_a_sweep_varies_rate_and_batch_alone():
    planned = {
        c.id: c.run for c in plan_cells(ladder(seeds=[1], sweep={"lr": [0.5, 1, 2], "batch": [2], "depths": [8]}))
    }
    base = planned["base-d8-x1-s1"]
    assert planned["base-d8-x1-lr2-s1"].optimizer.lr == 2 * base.optimizer.lr
    assert planned["base-d8-x1-b2-s1"].tokens_per_step > base.tokens_per_step
    assert len(planned) == 4 + 3


def test_a_cell_ends_on_a_point_of_validation_and_covers_its_tokens():
    for planned in plan_cells(ladder()):
        run = planned.run
        assert run.eval.interval is not None and run.steps == run.eval.interval * 4


def test_a_cells_run_file_reads_back(tmp_path):
    planned = plan_cells(ladder())[0]
    (tmp_path / "run.yaml").write_text(planned.run.to_yaml())
    assert load_run(tmp_path / "run.yaml") == planned.run


def test_the_digest_is_of_what_changes_the_result():
    first, moved = plan_cells(ladder())[0], plan_cells(ladder(folder="elsewhere"))[0]
    other = plan_cells(ladder(rules=SMALL | {"lr": 1e-3}))[0]
    assert first.config_digest == moved.config_digest != other.config_digest


def test_the_plan_adds_up():
    cells = plan_cells(ladder(hardware={"tflops": 1.0, "memory_gb": 0.001}))
    report = describe_ladder(ladder(hardware={"tflops": 1.0, "memory_gb": 0.001}), cells, layout_of)
    assert report["total"]["cells"] == len(cells) == 8
    assert report["total"]["flops"] == sum(row["flops"] for row in report["cells"])
    assert report["total"]["hours"] == pytest.approx(report["total"]["flops"] / 1e12 / 3600)
    assert len(report["problems"]) == 8
    assert "memory_gb" in report["problems"][0]
    for rung in report["rungs"]:
        n = rung["n"]
        assert n["prefill"] < n["active"] < n["backbone"] < n["total"]
        assert n["non_embedding"] < n["backbone"]
        assert sum(rung["by_kind"].values()) == n["total"]


def runner(machine: Machine, **changes):
    return Runner(ladder(**changes), machine, facts={}, digest=str, finished=str)


def test_cells_of_one_rank_share_gpus_in_turn_and_others_do_not():
    cards = ("0", "1", "2")
    runner(shared := Machine(slots=7, devices=cards))
    assert [shared.gpus(slot, 1) for slot in range(7)] == [(card,) for card in (*cards, *cards, "0")]
    with pytest.raises(ValueError, match=r"2 slots of hardware\.ranks 2 need more GPUs than the 3 here"):
        runner(Machine(slots=2, devices=cards), hardware={"ranks": 2})
    assert Machine(slots=2, devices=(*cards, "3")).gpus(1, 2) == ("2", "3")


def test_cells_that_share_a_gpu_must_fit_it_together():
    cells = plan_cells(ladder())
    sizes = sorted((row["memory_bytes"] for row in describe_ladder(ladder(), cells, layout_of)["cells"]), reverse=True)
    largest = sum(sizes[:3]) / 1e9
    check_sharing(ladder(hardware={"memory_gb": 1.001 * largest}), cells, layout_of, 3)
    with pytest.raises(ValueError, match=r"3 cells on one GPU need up to .* GB .*: lower --slots"):
        check_sharing(ladder(hardware={"memory_gb": 0.999 * largest}), cells, layout_of, 3)
    with pytest.raises(ValueError, match="hardware.memory_gb must say"):
        check_sharing(ladder(), cells, layout_of, 2)


def test_a_finished_cell_of_another_ladder_file_is_refused(tmp_path):
    (planned, *_), (changed, *_) = (
        plan_cells(ladder(folder=str(tmp_path), rules=SMALL | rules)) for rules in ({}, {"lr": 1e-3})
    )
    start_record(planned, {}, "of the data")
    planned.run_folder.mkdir(parents=True)
    (planned.run_folder / "metrics.jsonl").write_text(json.dumps({"step": planned.run.steps, "valid_loss": 2.0}))
    assert collect([planned])[0].loss == 2.0 and runner(Machine()).run([planned]) == []
    for refused in (collect, runner(Machine()).run):
        with pytest.raises(ValueError, match=f"cell {planned.id} in .* was started with config_digest"):
            refused([changed])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": [1]}, "seed is not a setting; did you mean seeds"),
        ({"rules": {"width_per_layr": 4}}, "rules.width_per_layr is not a setting; did you mean width_per_layer"),
        ({"arms": {"a": {"rules": {"stream": 1}}}}, "arms.a.rules.stream is not a rule; did you mean streams"),
        ({"arms": {"a": {"overrides": {"optimizer.nme": "muon"}}}}, "did you mean name"),
        ({"arms": {"a": {"overrides": {"optimizer.lr": 1.0}}}}, "through arms.a.rules"),
        ({"arms": {"base": {}}}, "is the ladder itself"),
        ({"depths": [8, 9]}, "depth 9 loses a mechanism"),
        ({"depths": []}, "at least one"),
        ({"seeds": [1, 1]}, "seeds must be distinct"),
        ({"tokens_per_parameter": []}, "no cells"),
        ({"base": FILE["base"] | {"optimizer": {"lr": 1.0}}}, "base.optimizer.lr is set by the ladder"),
        ({"base": FILE["base"] | {"model": {"preset": "tiny", "overrides": {"hidden_size": 8}}}}, "set by the dial"),
        ({"hardware": {"ranks": 0}}, r"hardware\.ranks must be positive, got 0"),
        ({"hardware": {"memory_gb": -1}}, r"hardware\.memory_gb must be positive, got -1"),
        ({"hardware": {"ranks": 3}, "base": FILE["base"] | {"parallel": {"tp": 2}}}, "not a multiple of tp x pp x cp"),
    ],
)
def test_mistakes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        plan_cells(ladder(**changes))


@pytest.mark.parametrize(
    "name, rungs, cells", [("cpu", 5, 5 * 2 + 2 * 2 * 2), ("gpu", 3, 3 * 2), ("optimizer", 1, 9 * 3)]
)
def test_examples_are_ladders_that_fit_their_hardware(name, rungs, cells):
    example = load_ladder(EXAMPLES / f"{name}.yaml")
    planned = plan_cells(example)
    assert len(example.depths) == rungs
    assert len({cell.id for cell in planned}) == cells
    assert describe_ladder(example, planned, layout_of)["problems"] == []
