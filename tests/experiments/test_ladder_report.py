"""Pictures and page from the rows of a known law; what cannot be fitted is said, not drawn."""

import dataclasses
import importlib.util
import re
from pathlib import Path

from megatron_dsv41.cli.ladder_fits import print_fits, print_predictions
from megatron_dsv41.experiments.fit_report import fit_report, predict_report
from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.ladder_report import write_report
from megatron_dsv41.typed_yaml import build


def sibling(name):
    """Another test file, for its rows."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIT, LADDER = sibling("test_fit"), sibling("test_ladder")


def test_everything_is_drawn_and_tied_together(tmp_path):
    ladder = build(Ladder, LADDER.FILE | {"folder": str(tmp_path)})
    arm = [FIT.row(n, 20 * n, FIT.loss_of(n, 20 * n) * 1.01, arm="worse", size=20.0) for n in FIT.SIZES[:3]]
    profiles = [dataclasses.replace(row, loss=FIT.loss_of(row.n["active"], row.tokens)) for row in FIT.iso_rows()]
    rows = [*FIT.ladder_rows(), *arm, *profiles]
    run_file = tmp_path / "configs" / f"{rows[0].cell}.yaml"
    run_file.parent.mkdir()
    run_file.write_text("model: <tiny>\n")
    written = write_report(ladder, [], rows)
    names = {path.name for path in written}
    pictures = ("curves", "loss_nd_active", "loss_c", "prediction_largest_rung", "prediction_each_point", "arms")
    assert {f"{n}.{end}" for n in pictures for end in ("png", "svg")} <= names
    assert all(path.stat().st_size > 1000 for path in written)
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64,") == sum(name.endswith(".png") for name in names)
    assert "http" not in page.replace("http://www.w3.org", "")  # readable offline
    assert re.findall('href="([^"]*)"', page) == [f"#{rows[0].cell}"]  # complete without other files
    assert f'<details id="{rows[0].cell}">' in page and "<pre>model: &lt;tiny&gt;\n</pre>" in page
    assert all(f"<td>{row.cell}</td>" in page for row in rows[1:])


def test_tables_hold_intervals_and_refusals(capsys):
    rows = FIT.ladder_rows()
    print_fits(fit_report(rows, ["active"]))
    print_predictions(predict_report(rows, ["active"]))
    print_predictions(predict_report(rows[:6], ["active"]))
    text = capsys.readouterr().out
    assert "1.69" in text and "alpha" in text and "%" in text
    assert "active: refused: L(N, D) has 5 parameters" in text
