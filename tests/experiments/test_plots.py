import json

import pytest

from megatron_dsv41.experiments.plots import plot_loss, read_metrics, series


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_a_resumed_run_gives_one_curve(tmp_path):
    rows = [{"step": s, "loss": 5.0 - s} for s in (1, 2, 3)] + [{"step": s, "loss": 0.5 - s} for s in (3, 4)]
    metrics = read_metrics(write(tmp_path / "metrics.jsonl", rows, '{"step": 5, "lo'))
    assert series(metrics, "step", "loss") == ([1, 2, 3, 4], [4.0, 3.0, -2.5, -3.5])


def test_rows_without_the_value_are_skipped(tmp_path):
    metrics = read_metrics(write(tmp_path / "m", [{"step": 1, "loss": 2.0}, {"step": 1, "valid_loss": 3.0}]))
    assert series(metrics, "step", "valid_loss") == ([1], [3.0])


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_the_plot_is_a_png_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "new" / "loss.png"
    plot_loss({"train": ([1, 2], [3.0, 2.0]), "valid": ([2], [2.5])}, target, title="t")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in target.parent.iterdir()] == ["loss.png"]
