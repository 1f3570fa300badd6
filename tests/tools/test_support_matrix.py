"""The README's table of layouts: written from reports of tests, and current."""

from pathlib import Path

import pytest
import support_matrix as matrix

from megatron_dsv41.testing.layouts import CURVES, FOUR_CUTS, FOUR_RANKS, SAMPLE, TWO_CUTS, TWO_RANKS

ROOT = Path(__file__).parents[2]

REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="parity" value="text_fp32 tp=2"/></properties></testcase>
<testcase name="b"><properties><property name="parity" value="text_fp32 cp=2"/></properties><failure/></testcase>
<testcase name="c"><properties><property name="curve" value="pp=2"/><property name="other" value="x"/></properties>
</testcase></testsuite></testsuites>"""


def test_only_passed_tests_count(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    records = matrix.read_records([report])
    assert records == {("parity", "text_fp32 tp=2"), ("curve", "pp=2")}
    rows = {row.split(" | ")[0]: row for row in matrix.table(records).splitlines()}
    assert "✓" in rows["| `tp=2`"] and "✓" not in rows["| `cp=2`"]
    report.write_text("cut off")
    with pytest.raises(ValueError, match="is not a junit report"):
        matrix.read_records([report])


def test_only_the_marked_place_changes():
    text = f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter"
    assert matrix.rewrite(text, "new") == f"before\n{matrix.BEGIN}\nnew\n{matrix.END}\nafter"
    with pytest.raises(ValueError, match="not marked"):
        matrix.rewrite("nothing", "new")


def test_the_readme_lists_every_layout_of_the_tests():
    """And no other, and no mark that no test could have made."""
    written = (ROOT / "README.md").read_text().split(matrix.BEGIN)[1].split(matrix.END)[0].strip().splitlines()
    layouts = [*TWO_RANKS, *TWO_CUTS, *FOUR_RANKS, *FOUR_CUTS, *SAMPLE]
    possible = {("parity", f"{case} {layout}") for case in matrix.CASES for layout in layouts}
    possible |= {(kind, layout) for kind in matrix.TRAINING for layout in CURVES}
    most = matrix.table(possible).splitlines()
    assert [row.split("|")[1] for row in written] == [row.split("|")[1] for row in most]
    for row, limit in zip(written[2:], most[2:], strict=True):
        for cell, allowed in zip(row.split("|"), limit.split("|"), strict=True):
            assert allowed.strip() or not cell.strip(), row
