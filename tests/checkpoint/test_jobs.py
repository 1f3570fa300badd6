"""Interrupted conversions continue, others are refused, nothing half-written looks complete."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from megatron_dsv41.checkpoint.convert import import_checkpoint
from megatron_dsv41.checkpoint.jobs import JOB, Job, Unit, divide, log_name, run_job
from megatron_dsv41.checkpoint.safetensors_io import SINGLE, Shard, ShardWriter, TensorSpec
from megatron_dsv41.checkpoint.verify import verify
from megatron_dsv41.testing.distributed import fork_server
from megatron_dsv41.testing.released import folder_bytes, full_config, import_slowly

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


def test_killed_right_before_it_gets_its_name_it_starts_over(tmp_path, monkeypatch):
    """Nothing but the name is missing then, and nothing says any more whose work it was."""

    def die(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(OSError, match="killed"):
            run_job(make_job(tmp_path / "out", writing_units([])), workers=1, progress=False)
    work = tmp_path / "out.incomplete"
    assert [path.name for path in work.iterdir()] == [SINGLE] and not (tmp_path / "out").exists()
    (work / "tokenizer.json").write_text("of other options")
    ran: list[int] = []
    run_job(make_job(tmp_path / "out", writing_units(ran), identity="other"), workers=1, progress=False)
    assert ran == list(range(8)) and [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE]


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


def start_and_kill(source, out, seconds: float) -> bool:
    """Start an import in a process of its own; whether it was still going when it was killed."""
    process = fork_server().Process(target=import_slowly, args=(source, out, 0.002))
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return alive


def test_killed_again_and_again_it_ends_the_same(tmp_path, full_released, full_native):
    """SIGKILL and the same command, several times, then to the end: the folder of an undisturbed run."""
    rng, out, kills = random.Random(7), tmp_path / "out", 0
    while not out.exists() and kills < 6:
        kills += start_and_kill(full_released, out, rng.uniform(0.05, 0.4))
    if not out.exists():
        import_checkpoint(full_released, out)
    assert kills >= 3
    assert folder_bytes(out) == folder_bytes(full_native)


@pytest.mark.slow
def test_killed_at_any_of_twenty_points_a_rerun_ends_the_same(tmp_path, full_released, full_native):
    """Each time one SIGKILL at a random point and one rerun; under the final name nothing in between, or all of it."""
    rng, killed, expected = random.Random(11), 0, folder_bytes(full_native)
    while killed < 20:
        out = tmp_path / f"out-{killed}"
        start_and_kill(full_released, out, rng.uniform(0.02, 1.5))
        if out.exists():  # it was done, and perhaps had not yet ended
            assert folder_bytes(out) == expected
            shutil.rmtree(out)
            continue
        with pytest.raises(ValueError, match=r"has neither|no such directory|not a checkpoint"):
            verify(out, config=full_config())
        import_checkpoint(full_released, out)
        assert folder_bytes(out) == expected
        killed += 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_processes_get_whole_files_but_for_huge_ones(count):
    sizes = {"huge": [5] * 40, "a": [10, 10], "b": [30], "c": [1, 2, 3], "d": [20]}
    units = [Unit(size, lambda writer: None, file) for file, members in sizes.items() for size in members]
    shares = divide(units, lambda target: target, count)
    assert sorted(i for share in shares for i in share) == list(range(len(units)))
    share = sum(unit.num_bytes for unit in units) / count
    for file, members in sizes.items():
        writers = [rank for rank, own in enumerate(shares) if any(units[i].target == file for i in own)]
        assert len(writers) == 1 or sum(members) > share
    loads = [sum(units[i].num_bytes for i in own) for own in shares]
    assert max(loads) <= share + 30


def place_in(folder: str, tmp_path):
    return {
        "current folder": (tmp_path / "cwd", Path(".")),
        "inside": (tmp_path, tmp_path / "source" / "out"),
        "link inside": (tmp_path, tmp_path / "link" / "out"),
        "unfinished source": (tmp_path, tmp_path / "x"),
        "foreign remains": (tmp_path, tmp_path / "y"),
        "file": (tmp_path, tmp_path / "file"),
    }[folder]


REFUSED = {
    "current folder": "is the current folder or a mount point",
    "inside": "which is read",
    "link inside": "which is read",
    "unfinished source": "which is read",
    "foreign remains": "is not an unfinished conversion",
    "file": "is not a folder",
}


@pytest.mark.parametrize("where", REFUSED)
def test_targets_that_would_hurt_are_refused(tmp_path, monkeypatch, where):
    for name in ("cwd", "source", "x.incomplete", "y.incomplete"):
        (tmp_path / name).mkdir()
    for name in ("source/a", "x.incomplete/a", "y.incomplete/a", "file"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    cwd, target = place_in(where, tmp_path)
    monkeypatch.chdir(cwd)
    sources = (tmp_path / "source", tmp_path / "x.incomplete")
    job = dataclasses.replace(make_job(target, writing_units([])), sources=sources)
    with pytest.raises(ValueError, match=REFUSED[where]):
        run_job(job, workers=1, progress=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    run_job(make_job(tmp_path / "out", writing_units([])), workers=1, progress=False)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "real" / SINGLE).exists()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]
