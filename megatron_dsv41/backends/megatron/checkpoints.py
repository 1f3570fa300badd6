"""A run's checkpoints on disk: complete or absent, whatever killed the process that wrote them.

Megatron writes its torch_dist checkpoint into `.saving/`; when it is complete and on disk it is renamed to
`iter_0000100/`, and only then the tracker file names it. Everything else in the folder is left over and ignored.
`files.json` in a checkpoint lists its files with their sizes: one that is lost later is found and named.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv41.checkpoint.distributed import lost_files, too_short
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.run_config import RUN_FILE

STAGING = ".saving"
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "files.json"
LOCK = ".lock"
MOST_LISTED = 10
HASH = "dsv41_engram_hash"  # in the stored arguments: the digest of all that decides an Engram row of these weights
# The lock files of this process. The system lets go of them when it ends, however it ends.
_held: dict[Path, TextIO] = {}


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return Path(folder) / f"iter_{step:07d}"


def checkpoint_step(path: str | Path) -> int | None:
    """The step of a checkpoint's folder, by its name; None where it is not one's."""
    match = re.fullmatch(r"iter_([0-9]{7,})", Path(path).name)
    return int(match[1]) if match else None


def complete_steps(folder: str | Path) -> list[int]:
    """Steps of all complete checkpoints in a run's folder, ascending. One that lost a file is not complete."""
    return [step for step in published_steps(folder) if not lost_parts(checkpoint_path(folder, step))]


def lost_parts(path: str | Path) -> list[str]:
    """Files of a checkpoint that are missing or too short, with what is wrong."""
    path = Path(path)
    try:
        sizes = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return lost_files(path)
    except ValueError as error:  # no JSON, or no text
        return [f"{MANIFEST} cannot be read ({error})"]
    return too_short(path, sizes)


def refuse_damaged(folder: str | Path, step: int | None = None) -> None:
    """ValueError naming the lost file when the checkpoint of `step`, or the newest one, is no longer whole, or gone."""
    if step is None:
        step = max(published_steps(folder), default=None)
    lost = [] if step is None else lost_parts(checkpoint_path(folder, step))
    if step is None or not lost:
        return
    path, more = checkpoint_path(folder, step), f" and {len(lost) - 1} more" if lost[1:] else ""
    others = ", ".join(map(str, complete_steps(folder))) or "there is none"
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} is gone: bring it back, or use another step ({others})")
    raise ValueError(
        f"checkpoint {path} is damaged: {lost[0]}{more}; bring it back, or remove {path} to use another step ({others})"
    )


def published_steps(folder: str | Path) -> list[int]:
    """Steps of all checkpoints that were complete once, ascending. Their files are not looked at."""
    found: list[int] = []
    for path in Path(folder).glob("iter_*"):
        step = checkpoint_step(path)
        whole = all((path / part).is_file() for part in (".metadata", "metadata.json"))
        if step is not None and (whole or (path / MANIFEST).is_file()):  # what was listed may be lost, and is named
            found.append(step)
    return sorted(found)


def open_folder(folder: str | Path, resume: bool) -> int | None:
    """Make the run's folder ready (one rank): the step to resume from, or None for a new run.

    The tracker is rewritten to name the newest complete checkpoint, and what a killed save left is deleted.
    ValueError when the folder holds something and must not be continued, or its newest checkpoint lost a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"checkpoint.folder {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        ours = complete_steps(folder) or any((folder / name).exists() for name in (RUN_FILE, TRACKER, STAGING, LOCK))
        if not resume:
            raise ValueError(
                f"checkpoint.folder {folder} is not empty and checkpoint.resume is false: choose another folder"
            )
        if not ours:
            raise ValueError(
                f"checkpoint.folder {folder} is not empty and holds no run of this program: choose another folder"
            )
    _make_ours(folder)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    refuse_damaged(folder)
    steps = complete_steps(folder)
    if not steps:
        (folder / TRACKER).unlink(missing_ok=True)
        return None
    _write_tracker(folder, steps[-1])
    return steps[-1]


@contextlib.contextmanager
def reading(
    path: Path,
    instead: str | None = None,
    errors: tuple[type[BaseException], ...] = (Exception, CheckpointException),  # torch's is no Exception
) -> Iterator[None]:
    """Turn whatever the readers of a damaged or vanished checkpoint raise into a ValueError that says how to go on.

    instead: what to do; default, for a run's own checkpoint: delete it. errors: that mean that it cannot be read.
    """
    try:
        yield
    except errors as error:
        state = f"cannot be read ({_cause(error)})" if path.is_dir() else "is gone"
        raise ValueError(f"checkpoint {path} {state}: {instead or _without(path)}") from error


def _without(path: Path) -> str:
    before = [step for step in complete_steps(path.parent) if checkpoint_path(path.parent, step) < path]
    rest = f"go on from step {before[-1]}" if before else "start again"
    return f"delete that folder to {rest}" if path.is_dir() else rest


def require_space(folder: str | Path, num_bytes: float, what: str = "one checkpoint") -> None:
    """OSError when the disk under `folder` has not `num_bytes` left."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            f"{what} takes about {num_bytes / 1e9:.1f} GB, the disk under {folder} has {free / 1e9:.1f} GB left: "
            "free some space, lower checkpoint.keep, or choose another checkpoint.folder"
        )


def save(folder: str | Path, step: int, keep: int | None, write: Callable[[str], None]) -> None:
    """`write(folder)` a checkpoint somewhere else, then put it in place. Collective.

    When writing fails, what was written is deleted, earlier checkpoints stay, and an OSError says what happened: on
    every rank, but where a rank fails alone while it writes: the others then wait for it, until it ends.
    """
    folder = Path(folder)
    staging, team = folder / STAGING, Team.of_default_group()

    def clear() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()

    try:
        team.first(clear)
        write(str(staging))
        team.first(lambda: _publish(folder, staging, step, keep))
    except (Exception, CheckpointException) as error:  # torch derives the second from BaseException
        # Nothing collective here: where this rank fails alone, the others are in collectives of `write`.
        if team.leads:
            shutil.rmtree(staging, ignore_errors=True)
        steps = complete_steps(folder)
        free = f"{shutil.disk_usage(folder).free / 1e9:.2f} GB free there" if folder.is_dir() else "the folder is gone"
        last = f"the last complete checkpoint is step {steps[-1]}" if steps else "there is no earlier checkpoint"
        raise OSError(f"saving step {step} to {folder} failed ({_cause(error)}; {free}); {last}") from error


def _publish(folder: Path, staging: Path, step: int, keep: int | None) -> None:
    written = staging / checkpoint_path(folder, step).name
    files = [path for path in written.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(written)): path.stat().st_size for path in files}
    (written / MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in [*written.rglob("*"), written]:
        _sync(path)
    target = checkpoint_path(folder, step)
    if target.exists():  # the same step again, after a resume from an older one
        os.replace(target, staging / "before")
    os.replace(written, target)
    _sync(folder)
    _write_tracker(folder, step)
    if keep is not None:
        for old in complete_steps(folder)[:-keep]:
            path = checkpoint_path(folder, old)
            with contextlib.suppress(OSError):
                os.replace(path, staging / path.name)  # whole or gone, for another run that starts from it
    shutil.rmtree(staging, ignore_errors=True)


def _make_ours(folder: Path) -> None:
    """Create the folder, and keep other runs out of it until this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder not in _held:
            _held[folder] = (folder / LOCK).open("a")
    except OSError as error:
        raise ValueError(f"checkpoint.folder {folder} cannot be written: {error.strerror}; choose another") from error
    try:
        fcntl.lockf(_held[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            _held.pop(folder).close()
            raise ValueError(
                f"checkpoint.folder {folder} is in use by another run: stop that one or choose another folder"
            ) from error
        # Any other error: the file system knows no locks.


def _write_tracker(folder: Path, step: int) -> None:
    temporary = folder / f".{TRACKER}.new"
    temporary.write_text(str(step))
    _sync(temporary)
    os.replace(temporary, folder / TRACKER)
    _sync(folder)


def compare_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], place: str) -> None:
    """ValueError listing the first ten tensors that are missing, extra or misshapen."""
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"extra: {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    problems += [
        f"misshapen: {name} is {list(found[name])}, the model has {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        shown = "\n  ".join(sorted(problems)[:MOST_LISTED])
        more = f"\n  and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else ""
        raise ValueError(f"{place} does not fit the model in {len(problems)} tensors:\n  {shown}{more}")


def model_shapes(sharded_state_dicts: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Name -> global shape of all model tensors of the world. Collective."""
    own = {entry.key: tuple(entry.global_shape) for state_dict in sharded_state_dicts for entry in state_dict.values()}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return {name: shape for part in everyone for name, shape in part.items()}


def stored_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> global shape of the model tensors in a checkpoint folder."""
    from megatron.core.dist_checkpointing import load_tensors_metadata

    metadata = load_tensors_metadata(str(path))
    return {
        name: tuple(tensor.global_shape)
        for name, tensor in metadata.items()
        if not name.startswith(("optimizer.", "chained_"))
    }


def stored_hash(path: str | Path) -> str | None:
    """The digest of Engram hash constants that a checkpoint was trained with; None in checkpoints without one."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    return getattr(load_common_state_dict(str(path)).get("args"), HASH, None)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CheckpointException) and not error.failures:  # Megatron tells the first rank alone
        return "a rank could not write its part: rank 0 says which and why"
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
