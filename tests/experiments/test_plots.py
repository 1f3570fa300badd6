from megatron_dsv41.experiments.plots import plot_loss, series


def test_a_step_written_twice_counts_once_with_its_later_value():
    rows = [{"step": s, "loss": 5.0 - s} for s in (1, 2, 3)] + [{"step": s, "loss": 0.5 - s} for s in (3, 4)]
    assert series(rows, "step", "loss") == ([1, 2, 3, 4], [4.0, 3.0, -2.5, -3.5])


def test_rows_without_the_value_are_skipped():
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "valid_loss": 3.0}, {"step": 3, "loss": None}]
    assert series(rows, "step", "valid_loss") == ([2], [3.0])


def test_the_plot_is_a_png_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "new" / "loss.png"
    plot_loss({"train": ([1, 2], [3.0, 2.0]), "valid": ([2], [2.5])}, target, title="t")
    assert target.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in target.parent.iterdir()] == ["loss.png"]
