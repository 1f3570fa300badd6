"""A run's folder while it is written: other runs may look at it at any time."""

import json
import shutil

import pytest

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.checkpoint.distributed import too_short


def write(staging):
    """What Megatron leaves: one checkpoint in the folder that it is given."""
    path = checkpoints.checkpoint_path(staging, write.step)
    path.mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        (path / name).write_text("some bytes")


def save(folder, step, keep=None):
    write.step = step
    checkpoints.save(folder, step, keep, write)


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
