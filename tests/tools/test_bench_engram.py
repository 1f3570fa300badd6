"""The benchmark's code runs; its numbers mean something on a GPU alone."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_engram.py"


def test_every_part_at_a_small_shape(tmp_path):
    small = ["--device", "cpu", "--tokens", "16", "--rows", "20000", "--shard-rows", "500", "--repeats", "1"]
    result = tmp_path / "out.json"
    subprocess.run([sys.executable, TOOL, *small, "--json", result], check=True, capture_output=True)
    rows = json.loads(result.read_text())
    parts = (
        "row numbers, distinct rows, gather and decode, gate forward, gate backward, gradients by row, "
        "balanced update, rows in FP8"
    )
    assert ", ".join(row["part"] for row in rows) == parts
    assert all(row["ms"] > 0 and row["bytes"] > 0 for row in rows)
