"""Rewrite the README's table of parallel layouts from the tests that ran: `tools/support_matrix.py JUNIT.xml...`.

Tests record what they proved as properties of their report (pytest --junitxml): (parity, "case layout"),
(curve, layout), (checkpoints, layout), (band, layout). A test that failed or was skipped proves nothing.
"""

from __future__ import annotations

import argparse
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_dsv41.testing.layouts import CURVES, FOUR_CUTS, FOUR_RANKS, SAMPLE, TWO_CUTS, TWO_RANKS

Record = tuple[str, str]
BEGIN, END = "<!-- layouts: tools/support_matrix.py writes this table -->", "<!-- end of layouts -->"
CASES = ("text_fp32", "packed_fp32", "odd_length_fp32")
TRAINING = {"curve": "10 steps", "band": "50 steps", "checkpoints": "checkpoints"}
CUTS = {"pp=2, every cut": TWO_CUTS, "pp=4, every cut": FOUR_CUTS}


def read_records(paths: Iterable[Path]) -> set[Record]:
    """What passed tests recorded. ValueError for a file that is no report."""
    found: set[Record] = set()
    for path in paths:
        try:
            tree = ElementTree.parse(path)
        except (OSError, ElementTree.ParseError) as error:
            raise ValueError(
                f"{path} is not a junit report ({error}): write one with pytest --junitxml=FILE"
            ) from error
        for test in tree.iter("testcase"):
            if all(test.find(outcome) is None for outcome in ("failure", "error", "skipped")):
                properties = ((p.attrib["name"], p.attrib["value"]) for p in test.iter("property"))
                found |= {record for record in properties if record[0] in {"parity", *TRAINING}}
    return found


def table(records: set[Record]) -> str:
    """The table in Markdown: a row per layout, a mark per proof, numbers where a row stands for many cuts."""
    header = ["layout", *(f"parity {case.removesuffix('_fp32')}" for case in CASES), *TRAINING.values()]
    lines = [_row(header), _row(["---"] * len(header))]
    single = dict.fromkeys([*TWO_RANKS, *FOUR_RANKS, *SAMPLE, *CURVES])
    for layout in single:
        parity = [_mark(("parity", f"{case} {layout}") in records) for case in CASES]
        name = layout.replace("|", r"\|")  # a bar would end the cell
        lines.append(_row([f"`{name}`", *parity, *(_mark((kind, layout) in records) for kind in TRAINING)]))
    for title, cuts in CUTS.items():
        counts = [sum(("parity", f"{case} {layout}") in records for layout in cuts) for case in CASES]
        lines.append(_row([title, *(f"{count} of {len(cuts)}" if count else "" for count in counts), "", "", ""]))
    return "\n".join(lines)


def rewrite(text: str, new: str) -> str:
    """`text` with `new` between the marks. ValueError when they are not there."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the table's place is not marked: write {BEGIN} and {END} around it")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(proved: bool) -> str:
    return "✓" if proved else ""


def main() -> None:
    """See module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="junit reports of the tests that ran")
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "README.md")
    arguments = parser.parse_args()
    new = rewrite(arguments.file.read_text(), table(read_records(arguments.reports)))
    temporary = arguments.file.with_name(f".{arguments.file.name}.new")
    temporary.write_text(new)
    os.replace(temporary, arguments.file)


if __name__ == "__main__":
    main()
