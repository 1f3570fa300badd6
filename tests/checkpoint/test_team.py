"""Several processes, one conversion: the same bytes, whatever their number, whoever dies or fails."""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.pieces import FIXED_BYTES, GIB, PIECE_BYTES, Effort
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.released import folder_bytes, import_slowly

PLENTY = Effort(max_memory=16 * GIB, workers=1)


def import_together(src: Path, dst: Path, layout: Layout | None) -> None:
    """On a rank."""
    import_checkpoint(src, dst, layout=layout, effort=PLENTY, team=Team.of_world())


def export_together(src: Path, dst: Path) -> None:
    """On a rank."""
    export_checkpoint(src, dst, effort=PLENTY, team=Team.of_world())


def message_of(src: Path, dst: Path) -> tuple[str, str]:
    """On a rank: what it is told."""
    try:
        import_together(src, dst, None)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_three_and_two_processes_write_what_one_writes(tmp_path, full_released, full_native):
    run_ranks(import_together, 3, full_released, tmp_path / "native", None)
    assert folder_bytes(tmp_path / "native") == folder_bytes(full_native)
    run_ranks(export_together, 2, tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(full_released)


def test_two_processes_divide_for_another_layout(tmp_path, full_released):
    layout = Layout(stages=((0, 1, 2), (3, 4, 5, 6, 7)), ep=3, engram=3)
    run_ranks(import_together, 2, full_released, tmp_path / "there", layout)
    run_ranks(export_together, 3, tmp_path / "there", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(full_released)


def test_killed_teams_are_continued_by_teams_of_other_sizes(tmp_path, full_released, full_native):
    rng, out, work = random.Random(3), tmp_path / "out", tmp_path / "out.incomplete"
    for size in (3, 1, 2):
        if out.exists():
            break
        with Ranks(import_slowly, size, full_released, out, 0.004, together=True) as ranks:
            ranks.wait_until(lambda: any(log.stat().st_size > 1 for log in work.glob("done.*.log")) or out.exists())
            time.sleep(rng.uniform(0, 0.3))
            ranks.kill()
    assert len(list(work.glob("done.*.log"))) > 1
    import_checkpoint(full_released, out)
    assert folder_bytes(out) == folder_bytes(full_native)


def test_one_processs_bad_input_ends_all_and_leaves_nothing(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    info = SafetensorsFolder(full_released).info("layers.6.attn.wq_b.scale")
    with (tmp_path / "src" / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    told = run_ranks(message_of, 3, tmp_path / "src", tmp_path / "native")
    assert {kind for kind, _ in told} == {"ValueError"}
    assert all(f"{info.file}: layers.6.attn.wq_b.scale: 1 of" in text for _, text in told)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_bad_settings_are_everyones_error(tmp_path, full_released):
    told = run_ranks(message_of, 2, full_released, full_released / "inside")
    assert {kind for kind, _ in told} == {"ValueError"} and len({text for _, text in told}) == 1


FAILURES = {
    "lost": lambda: Path("nowhere/at all").read_text(),
    "full": lambda: os.rename("nowhere", "else"),
    "wrong": lambda: int("nothing"),
    "absent": lambda: {}["key"],
    "broken": lambda: fail(RuntimeError("a reader broke")),
    "torch": lambda: fail(CheckpointException("load", {0: (OSError("disk is gone"), None)})),
    "exit": lambda: sys.exit(3),
}


def fail(error: BaseException) -> None:
    raise error


def unsendable() -> str:
    """On a rank: what is raised where the first one has a value that cannot be sent to the others."""
    try:
        Team.of_world().first(threading.Lock)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_value_that_cannot_be_sent_is_everyones_error():
    first, *others = run_ranks(unsendable, 3, timeout=30.0)
    assert first == "TypeError: cannot pickle '_thread.lock' object"
    assert others == [f"RuntimeError: {first}"] * 2


def failures(method: str) -> list[tuple[type, str, bool]]:
    """On a rank: for each failure of the first one, what is raised here, and whether the traceback shows its place."""
    team, told = Team.of_world(), []
    for failure in FAILURES.values():
        try:
            getattr(team, method)(failure if team.leads or method == "first" else lambda: None)
        except Exception as error:
            told.append((type(error), str(error), "in <lambda>" in "".join(traceback.format_exception(error))))
    return told


@pytest.mark.parametrize("method", ["first", "together"])
def test_whatever_the_first_process_meets_everyone_is_told(method):
    first, *others = ([row[:2] for row in told] for told in run_ranks(failures, 3, method))
    kinds = [FileNotFoundError, FileNotFoundError, ValueError, KeyError, *[RuntimeError] * 3]
    assert [kind for kind, _ in first] == kinds
    for told in others:
        assert [kind for kind, _ in told] == [RuntimeError if kind is KeyError else kind for kind in kinds]
        assert told[3][1] == "KeyError: 'key'"
        assert [text for kind, text in told if kind is not RuntimeError] == [text for _, text in first[:3]]
        assert told[4:] == first[4:]
    texts = dict(zip(FAILURES, (text for _, text in first), strict=True))
    assert "'nowhere/at all'" in texts["lost"] and "'nowhere' -> 'else'" in texts["full"]
    assert texts["broken"] == "a reader broke" and texts["exit"] == "SystemExit: 3"
    assert texts["torch"].startswith("CheckpointException: ") and "OSError: disk is gone" in texts["torch"]


@pytest.mark.parametrize("size", [1, 2])
def test_the_traceback_of_the_first_process_is_kept(size):
    assert all(shown for _, _, shown in run_ranks(failures, size, "first")[0])


def test_memory_is_shared_by_the_processes_of_a_machine():
    effort = Effort(max_memory=8 * GIB)
    piece = math.ceil((8 * GIB / 4 - FIXED_BYTES) / 3 / 24)  # three such pieces are a little too much for one of four
    assert effort.threads(PIECE_BYTES // 24, 1) >= 1
    assert Effort(max_memory=8 * GIB, workers=8).threads(piece, 4) == 2
    with pytest.raises(ValueError, match="9 processes with the largest piece"):
        Effort(max_memory=9 * FIXED_BYTES).threads(1, 9)
