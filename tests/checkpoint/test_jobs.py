"""Interrupted conversions continue, others are refused, nothing half-written looks complete."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal

import pytest

from megatron_dsv41.checkpoint.convert import import_checkpoint
from megatron_dsv41.checkpoint.jobs import JOB, Job, Unit, log_name, run_job
from megatron_dsv41.checkpoint.safetensors_io import SINGLE, Shard, ShardWriter, TensorSpec
from megatron_dsv41.testing.released import folder_bytes, import_slowly

SPEC = TensorSpec("a", "U8", (8,))


def make_job(target, units, identity="job"):
    return Job(
        target=target,
        writer=lambda work: ShardWriter(work, [Shard(SINGLE, (SPEC,))]),
        units=units,
        finish=lambda work: None,
        identity=identity,
        title="test",
    )


def writing_units(ran: list[int], fail_at: int = -1, error: type[Exception] = OSError) -> list[Unit]:
    import torch

    def unit(i: int) -> Unit:
        def run(writer: ShardWriter) -> None:
            if i == fail_at:
                raise error("stopped")
            ran.append(i)
            writer.write_bytes("a", i, torch.tensor([i], dtype=torch.uint8))

        return Unit(1, run)

    return [unit(i) for i in range(8)]


@pytest.fixture
def sync_always(monkeypatch):
    monkeypatch.setattr("megatron_dsv41.checkpoint.jobs.SYNC_SECONDS", 0.0)
    monkeypatch.setattr("megatron_dsv41.checkpoint.jobs.BATCH_UNITS", 1)


def test_interrupted_job_continues_where_it_stopped(tmp_path, sync_always):
    first: list[int] = []
    with pytest.raises(OSError, match="stopped"):
        run_job(make_job(tmp_path / "out", writing_units(first, fail_at=5)), workers=1, progress=False)
    assert not (tmp_path / "out").exists()
    noted = (tmp_path / "out.incomplete" / log_name(0)).read_text().split()
    second: list[int] = []
    run_job(make_job(tmp_path / "out", writing_units(second)), workers=1, progress=False)
    assert sorted(int(line.rstrip(".")) for line in noted) + second == list(range(8)) and noted
    assert (tmp_path / "out" / SINGLE).read_bytes()[-8:] == bytes(range(8))
    assert [p.name for p in (tmp_path / "out").iterdir()] == [SINGLE]
    assert not (tmp_path / "out.incomplete").exists()


def test_line_cut_off_in_the_log_is_not_believed(tmp_path, sync_always):
    with pytest.raises(OSError, match="stopped"):
        run_job(make_job(tmp_path / "out", writing_units([], fail_at=5)), workers=1, progress=False)
    log = tmp_path / "out.incomplete" / log_name(0)
    log.write_text("0.\n1.\n7")
    again: list[int] = []
    run_job(make_job(tmp_path / "out", writing_units(again)), workers=1, progress=False)
    assert again == [2, 3, 4, 5, 6, 7]


def test_bad_input_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="stopped"):
        run_job(make_job(tmp_path / "out", writing_units([], 5, ValueError)), workers=2, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_remains_of_another_job_are_refused(tmp_path):
    with pytest.raises(OSError, match="stopped"):
        run_job(make_job(tmp_path / "out", writing_units([], fail_at=5)), workers=1, progress=False)
    with pytest.raises(ValueError, match="left by another conversion"):
        run_job(make_job(tmp_path / "out", writing_units([]), identity="other"), workers=1, progress=False)
    assert (tmp_path / "out.incomplete" / JOB).exists()


def test_job_without_identity_starts_over(tmp_path):
    with pytest.raises(OSError, match="stopped"):
        run_job(make_job(tmp_path / "out", writing_units([], fail_at=5)), workers=1, progress=False)
    ran: list[int] = []
    run_job(make_job(tmp_path / "out", writing_units(ran), identity=None), workers=1, progress=False)
    assert ran == list(range(8))


def test_two_at_once_are_refused(tmp_path):
    inner: list[str] = []

    def run(writer: ShardWriter) -> None:
        with pytest.raises(ValueError, match="running already"):
            run_job(make_job(tmp_path / "out", []), workers=1, progress=False)
        inner.append("refused")

    run_job(make_job(tmp_path / "out", [Unit(1, run)]), workers=1, progress=False)
    assert inner == ["refused"]


def test_progress_bar_shows(tmp_path, capsys):
    run_job(make_job(tmp_path / "out", writing_units([])), workers=2, progress=True)
    assert "test" in capsys.readouterr().err


def test_killed_at_random_points_it_ends_the_same(tmp_path, full_released, full_native):
    """SIGKILL again and again, then to the end: the folder of an undisturbed run, and none under its name before."""
    rng = random.Random(7)
    out = tmp_path / "out"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_dsv41.checkpoint.convert"])
    kills = 0
    while not out.exists() and kills < 6:
        process = context.Process(target=import_slowly, args=(full_released, out, 0.002))
        process.start()
        process.join(rng.uniform(0.05, 0.4))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            kills += 1
    if not out.exists():
        import_checkpoint(full_released, out)
    assert kills >= 3
    assert folder_bytes(out) == folder_bytes(full_native)
