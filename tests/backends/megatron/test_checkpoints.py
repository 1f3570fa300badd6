"""A run's folder while it is written: other runs may look at it at any time."""

import errno
import json
import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.checkpoint.distributed import too_short
from megatron_dsv41.testing.distributed import Ranks, run_ranks


def write(staging):
    """What Megatron leaves: one checkpoint in the folder that it is given."""
    path = checkpoints.checkpoint_path(staging, write.step)
    path.mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (path / name).write_text("some bytes")


def save(folder, step, keep=None):
    write.step = step
    checkpoints.save(folder, step, keep, write)


def told_of_save(folder, failing=None):
    """On a rank: what is said of a save, or "". Rank `failing` raises while it writes."""
    write.step, rank = 2, torch.distributed.get_rank()

    def part(staging):
        if rank == 0:
            write(staging)
        if rank == failing:
            raise OSError(errno.ENOSPC, "no space", "a part")
        torch.distributed.barrier()  # as in Megatron's save

    try:
        checkpoints.save(folder, 2, None, part)
    except OSError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", [checkpoints.STAGING, f".{checkpoints.TRACKER}.new"])
def test_what_the_first_rank_cannot_put_in_place_is_everyones_error(tmp_path, place):
    """Something else lies in the way."""
    save(tmp_path, 1)
    if place == checkpoints.STAGING:
        (tmp_path / place).touch()
    else:
        (tmp_path / place).mkdir()
    for told in run_ranks(told_of_save, 2, tmp_path):
        assert told.startswith(f"saving step 2 to {tmp_path} failed ([Errno ") and f"'{tmp_path / place}'" in told
    assert 1 in checkpoints.complete_steps(tmp_path)


def test_a_save_into_a_folder_that_is_gone(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(OSError, match=f"saving step 3 to {folder} failed .*; the folder is gone"):
        save(folder, 3)


def test_a_save_that_failed_on_some_rank(tmp_path):
    def part(staging):
        raise CheckpointException("write", {})  # Megatron's, but on the first rank

    with pytest.raises(OSError, match=r"failed \(a rank could not write its part: rank 0 says which and why"):
        checkpoints.save(tmp_path, 3, None, part)


def ended_after_save(folder, failing):
    """On a rank: as a trainer whose save failed, which ends and closes its connections."""
    (folder / f"told {torch.distributed.get_rank()}").write_text(told_of_save(folder, failing))
    os._exit(0)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_one_that_failed_alone(tmp_path, failing):
    save(tmp_path, 1)
    with Ranks(ended_after_save, 2, tmp_path, failing) as ranks:
        for process in ranks.processes:
            process.join(60)
        assert [process.exitcode for process in ranks.processes] == [0, 0]
    told = [(tmp_path / f"told {rank}").read_text() for rank in (0, 1)]
    assert all(text.startswith(f"saving step 2 to {tmp_path} failed (") for text in told)
    assert all(text.endswith("the last complete checkpoint is step 1") for text in told)
    assert "no space: 'a part'" in told[failing] and not (tmp_path / checkpoints.STAGING).exists()


def test_a_list_of_files_that_cannot_be_read(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (checkpoints.checkpoint_path(tmp_path, 2) / checkpoints.MANIFEST).write_text("{")
    assert checkpoints.complete_steps(tmp_path) == [1]
    with pytest.raises(ValueError, match=r"iter_0000002 is damaged: files.json cannot be read .*another step \(1\)"):
        checkpoints.refuse_damaged(tmp_path)


def killed(path, **kwargs):
    """A deletion that ends with the process, one file in."""
    for file in path.rglob("*"):
        if file.is_file():
            file.unlink()
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_save_removes_is_whole_or_gone(tmp_path, monkeypatch, step):
    """An older checkpoint, or that of the same step."""
    save(tmp_path, 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        save(tmp_path, step, keep=1)
    assert checkpoints.published_steps(tmp_path) == checkpoints.complete_steps(tmp_path) == [step]
    assert checkpoints.open_folder(tmp_path, resume=True) == step
    assert not (tmp_path / checkpoints.STAGING).exists()


def test_a_checkpoint_that_is_removed_while_it_is_looked_at(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    path = checkpoints.checkpoint_path(tmp_path, 1)
    sizes = json.loads((path / checkpoints.MANIFEST).read_text())
    shutil.rmtree(path)
    assert checkpoints.lost_parts(path)
    assert too_short(path, sizes) == [f"{name} is missing" for name in sizes]
    with pytest.raises(ValueError, match=r"iter_0000001 is gone: bring it back, or use another step \(2\)"):
        checkpoints.refuse_damaged(tmp_path, 1)
