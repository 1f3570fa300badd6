"""Fit and predict from the collected rows of a ladder: python tools/fit_ladder.py FOLDER [--json]."""

import argparse
import json
from pathlib import Path

from megatron_dsv41.cli.ladder_fits import print_fits, print_predictions
from megatron_dsv41.experiments.collect import ROWS_FILE, read_rows
from megatron_dsv41.experiments.fit_report import fit_report, predict_report


def main() -> None:
    """Print both reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder with {ROWS_FILE}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    rows = read_rows(arguments.folder)
    fitted, predicted = fit_report(rows), predict_report(rows)
    if arguments.json:
        print(json.dumps({"fit": fitted, "predict": predicted}))
    else:
        print_fits(fitted)
        print_predictions(predicted)


if __name__ == "__main__":
    main()
