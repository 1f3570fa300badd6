"""Several processes, one conversion: the same bytes, whatever their number, whoever dies or fails."""

from __future__ import annotations

import math
import random
import shutil
import time
from pathlib import Path

import pytest

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


def test_memory_is_shared_by_the_processes_of_a_machine():
    effort = Effort(max_memory=8 * GIB)
    piece = math.ceil((8 * GIB / 4 - FIXED_BYTES) / 3 / 24)  # three such pieces are a little too much for one of four
    assert effort.threads(PIECE_BYTES // 24, 1) >= 1
    assert Effort(max_memory=8 * GIB, workers=8).threads(piece, 4) == 2
    with pytest.raises(ValueError, match="9 processes with the largest piece"):
        Effort(max_memory=9 * FIXED_BYTES).threads(1, 9)
