"""The benchmark of layouts runs whole over gloo; its speeds mean something on GPUs alone."""

import json
import sys

import bench_layouts as bench
import pytest

SMALL = ["2", "--device", "cpu", "--preset", "tiny", "--tokens", "64", "--context-tokens", "128"]
SMALL += ["--micro-batches", "2", "--steps", "2", "--warm", "1"]


def run(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench_layouts.py", *SMALL, "--out", str(folder), *arguments])
    status = bench.main()
    return status, json.loads((folder / "results.json").read_text()), (folder / "table.md").read_text()


def test_cases_compare_equal_work_per_gpu():
    cases = {case.name: case for case in bench.plan_cases(2, 8192, 32768, 8)}
    assert list(cases) == [
        "one, 1 x 8192",
        "one, 4 x 8192",
        "one, 1 x 16384",
        "dp=2",
        "ep=2",
        "tp=2,sp",
        "pp=2",
        "cp=2",
        "dp=2,engram",
    ]
    for case in cases.values():
        if case.base:
            assert cases[case.base].tokens_per_gpu == case.tokens_per_gpu, case
    assert cases["pp=2"].sequences == 8 and cases["cp=2"].seq == 32768
    assert len({case.file for case in cases.values()}) == len(cases)
    # Three micro-batches are no whole number for each of two GPUs; equal one-GPU cases are one.
    assert {case.name: case for case in bench.plan_cases(2, 64, 128, 3)}["pp=2"].sequences == 4
    assert [case.name for case in bench.plan_cases(2, 64, 128, 2) if not case.base] == ["one, 1 x 64"]


@pytest.mark.ranks(2)
def test_layouts_are_measured_and_one_that_fails_is_named(monkeypatch, tmp_path):
    wrong = bench.Case("wrong", 2, 64, 2, 1, ("checkpoint.folder=/proc/none",), "one, 1 x 64")
    stock = bench.plan_cases
    monkeypatch.setattr(bench, "plan_cases", lambda *sizes: [wrong, *stock(*sizes)])
    chosen = ["--layouts", "wrong", "tp=2,sp", "pp=2", "--traces", f"{tmp_path}/traces"]
    status, results, text = run(monkeypatch, tmp_path / "out", *chosen)
    assert status == 1 and list(results["failed"]) == ["wrong"]
    assert "/proc/none" in results["failed"]["wrong"] and "FAILED wrong" in text
    assert list(results["layouts"]) == ["one, 1 x 64", "tp=2,sp", "pp=2"]
    for name, axis in (("tp=2,sp", "tensor"), ("pp=2", "pipeline")):
        found = results["layouts"][name]
        assert found["efficiency"] > 0 and found["ms_least"] <= found["ms"] <= found["ms_largest"]
        assert found["traffic"][axis]["measured"] == pytest.approx(found["traffic"][axis]["planned"]) != 0
        assert all(step["exposed"] <= step["length"] for step in found["profile"])
    assert all(found["loss"] == pytest.approx(7.62, abs=0.3) for found in results["layouts"].values())  # ln 2048
    assert text.count(" equal ") == 2 and "differ" not in text
    assert {file.suffix for file in (tmp_path / "out").iterdir()} == {".json", ".md", ".png"}
    assert len(list((tmp_path / "traces").glob("*.trace.json.gz"))) == 5


def test_a_machine_without_gpus_is_not_filled_with_the_proxy_model(monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["bench_layouts.py", "2"])
    with pytest.raises(SystemExit, match="needs 2 GPUs, this machine has 0"):
        bench.parse()


def test_what_cannot_be_or_does_not_fit_is_left_out(monkeypatch, tmp_path):
    status, results, _ = run(monkeypatch, tmp_path, "--layouts", "cp=2", "--gib", "0.0001", "--set", "train.seed=2")
    assert status == 1 and results["layouts"] == {}
    assert all("train.recompute=selective" in why for why in results["failed"].values())
    with pytest.raises(SystemExit, match="unknown layouts"):
        run(monkeypatch, tmp_path, "--layouts", "cp=3")


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_layout(monkeypatch, tmp_path):
    status, results, text = run(monkeypatch, tmp_path)
    assert status == 0 and len([f for f in results["layouts"].values() if "efficiency" in f]) == 6
    assert "differ" not in text and "engram_fetch_exposed_ms" in text
    kinds = {
        name: {kind for step in found["profile"] for kind in step["sent"]} for name, found in results["layouts"].items()
    }
    for name, kind in (("ep=2", "EP exchange"), ("cp=2", "CP halo"), ("dp=2", "DP reduce")):
        assert kind in kinds[name]
    assert {"Engram fetch", "Engram return"} <= kinds["dp=2,engram"]
