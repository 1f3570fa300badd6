"""Reading a run's weights outside of Megatron."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_dsv41 import presets
from megatron_dsv41.backends.megatron.checkpoints import complete_steps, open_folder
from megatron_dsv41.backends.megatron.run_checks import record_run
from megatron_dsv41.backends.megatron.run_export import export_run
from megatron_dsv41.backends.megatron.run_source import (
    RunSource,
    StartRecord,
    named_checkpoint,
    origin_of,
    run_and_step,
)
from megatron_dsv41.checkpoint.convert import export_checkpoint, load_released
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.cli import main
from megatron_dsv41.cli.evaluate import open_checkpoint
from megatron_dsv41.run_config import load_run, run_from_dict

RUN = {
    "model": {"preset": "tiny"},
    "data": {"train": "absent", "seq_length": 8},
    "batch": {"sequences": 1},
    "train": {"steps": 2, "precision": "fp32"},
    "checkpoint": {"folder": "x"},
}


def write_run(folder, step=1, leave_out=()):
    """A run's folder as training leaves it, without the optimizer. Returns the native tensors."""
    run = run_from_dict(RUN)
    (folder / "run.yaml").write_text(run.to_yaml())
    generator = torch.Generator().manual_seed(step)
    state = {b.native: torch.randn(b.shape, generator=generator) for b in bind(run.architecture())}
    stored = {name: tensor for name, tensor in state.items() if name not in leave_out}
    path = folder / f"iter_{step:07d}"
    save(stored | {"optimizer.step": torch.ones(1)}, storage_writer=FileSystemWriter(path), no_dist=True)
    for name in ("common.pt", "metadata.json"):
        (path / name).touch()
    return state


def test_whole_tensors_and_rows(tmp_path):
    state = write_run(tmp_path)
    source = RunSource(tmp_path)
    assert source.config == dataclasses.replace(presets.tiny(), dtype="float32")
    assert list(source.names()) == list(state)
    name = "layers.3.ffn.experts.w13"
    assert torch.equal(source.read(name), state[name])
    assert torch.equal(source.read(name, slice(3, 5)), state[name][3:5])
    assert source.shape(name) == state[name].shape
    assert source.dtype(name) == "F32"


def test_the_newest_checkpoint_or_a_named_one(tmp_path):
    first, second = write_run(tmp_path, 1), write_run(tmp_path, 2)
    assert torch.equal(RunSource(tmp_path).read("norm.weight"), second["norm.weight"])
    assert torch.equal(RunSource(tmp_path, 1).read("norm.weight"), first["norm.weight"])
    with pytest.raises(ValueError, match="no checkpoint of step 7; it has 1, 2"):
        RunSource(tmp_path, 7)


def test_an_export_gives_the_weights_back(tmp_path):
    (tmp_path / "run").mkdir()
    state = write_run(tmp_path / "run")
    source = RunSource(tmp_path / "run")
    export_checkpoint(source, tmp_path / "hf", config=source.config)
    again = load_released(tmp_path / "hf")
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_a_missing_tensor_is_named(tmp_path):
    write_run(tmp_path, leave_out=("layers.2.attn.wkv.weight",))
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model, such as layers\.2\.attn\.wkv\.weight"):
        RunSource(tmp_path)


def test_a_run_without_checkpoint(tmp_path):
    (tmp_path / "run.yaml").write_text(run_from_dict(RUN).to_yaml())
    with pytest.raises(ValueError, match="no complete checkpoint yet"):
        RunSource(tmp_path)


def test_a_checkpoint_that_lost_a_file_is_not_complete_and_is_named(tmp_path):
    write_run(tmp_path, 1)
    write_run(tmp_path, 2)
    assert complete_steps(tmp_path) == [1, 2]
    part = next((tmp_path / "iter_0000002").glob("*.distcp"))
    part.unlink()
    assert complete_steps(tmp_path) == [1]
    for use in (lambda: RunSource(tmp_path), lambda: RunSource(tmp_path, 2), lambda: open_folder(tmp_path, True)):
        with pytest.raises(ValueError, match=rf"iter_0000002 is damaged: {part.name} is missing.* another step \(1\)"):
            use()
    assert RunSource(tmp_path, 1).step == 1


def test_files_beside_the_tensors_are_missed_too(tmp_path):
    """Once published, a checkpoint knows all of its files: the optimizer's and Megatron's own, too."""
    write_run(tmp_path, 1)
    path = tmp_path / "iter_0000001"
    (path / "files.json").write_text(json.dumps({file.name: file.stat().st_size for file in path.iterdir()}))
    assert complete_steps(tmp_path) == [1]
    (path / "common.pt").unlink()
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_a_checkpoint_that_lost_its_description_is_named_not_passed_over(tmp_path, name):
    write_run(tmp_path, 1)
    write_run(tmp_path, 2)
    path = tmp_path / "iter_0000002"
    (path / "files.json").write_text(json.dumps({file.name: file.stat().st_size for file in path.iterdir()}))
    (path / name).unlink()
    assert complete_steps(tmp_path) == [1]
    for use in (lambda: RunSource(tmp_path), lambda: open_folder(tmp_path, True)):
        with pytest.raises(ValueError, match=rf"iter_0000002 is damaged: {re.escape(name)} is missing.*another step"):
            use()


def test_a_run_is_named_by_its_folder_or_by_a_checkpoint(tmp_path):
    for name in ("run", "iter_0000007"):  # a run may be called what it likes
        (tmp_path / name).mkdir()
        write_run(tmp_path / name)
        assert run_and_step(tmp_path / name) == (tmp_path / name, None)
    assert run_and_step(tmp_path / "run" / "iter_0000001") == (tmp_path / "run", 1)
    for other in ("run/exports", "run/iter_0000001/__0_0.distcp", "iter_0000008", "run/iter_1x"):
        assert run_and_step(tmp_path / other) is None


def test_the_origin_of_runs_that_started_from_runs(tmp_path):
    """Each start is recorded while the run before it is there; a run without a record is of its run file's start."""
    before = {"b": "a/iter_0000001", "c": "b", "e": "d"}
    for name, start in {"a": "hub", "b": before["b"], "c": "b", "d": None, "e": "d"}.items():
        folder = tmp_path / name
        folder.mkdir()
        run = run_from_dict(RUN, () if start is None else (f"train.init_from={start}",))
        (folder / "run.yaml").write_text(run.to_yaml())
        if name in before:
            StartRecord.of(tmp_path / start).write(folder)
    shutil.rmtree(tmp_path / "b")
    there = str(Path("hub").absolute())  # whoever exports may be elsewhere
    assert [origin_of(tmp_path / name) for name in "acde"] == ["hub", there, None, None]
    assert StartRecord.of(Path("hub")) == StartRecord(weights=there, origin=there)
    assert StartRecord.of(tmp_path / "c") == StartRecord(weights=str(tmp_path / "c"), origin=there)
    assert StartRecord.of(None) == StartRecord(weights=None, origin=None)
    StartRecord(None, "hub").write(tmp_path)
    assert (tmp_path / "started_from.json").read_text() == '{"weights": null, "origin": "hub"}\n'


def test_the_origin_of_runs_whose_record_was_not_kept(tmp_path):
    """A copy of the run file and the checkpoints alone; a run that was resumed with itself as its start."""
    for name, start in {"a": "hub", "b": "a/iter_0000001", "self": "self"}.items():
        (tmp_path / name).mkdir()
        given = start if start == "hub" else tmp_path / start
        (tmp_path / name / "run.yaml").write_text(run_from_dict(RUN, (f"train.init_from={given}",)).to_yaml())
    assert [origin_of(tmp_path / name) for name in ("a", "b", "self")] == ["hub", "hub", None]


@pytest.mark.parametrize("text", ["{", '{"weights": null}', "[]"])
def test_a_record_that_does_not_say_the_origin(tmp_path, text):
    (tmp_path / "started_from.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/started_from.json does not say where .*: write {{"):
        origin_of(tmp_path)


def test_a_resumed_run_without_a_record_gets_one(tmp_path):
    """Before its run file is written anew, with whatever start it names now."""
    run = run_from_dict(RUN, (f"checkpoint.folder={tmp_path}",))
    (tmp_path / "run.yaml").write_text(run_from_dict(RUN, (f"train.init_from={tmp_path / 'hub'}",)).to_yaml())
    record_run(run)
    assert load_run(tmp_path / "run.yaml") == run and origin_of(tmp_path) == str(tmp_path / "hub")
    record_run(run)
    assert origin_of(tmp_path) == str(tmp_path / "hub")


def test_an_export_names_an_origin_that_is_gone(tmp_path):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run")
    StartRecord.of(tmp_path / "hub").write(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"come from .*hub, which is no checkpoint folder.*started_from.json; .*--like"
    ):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_to_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run" / "iter_0000001")
    (tmp_path / "best").symlink_to(tmp_path / "run")
    assert run_and_step(tmp_path / "latest") == ((tmp_path / "run").resolve(), 1)
    assert run_and_step(tmp_path / "best") == (tmp_path / "best", None)
    monkeypatch.chdir(tmp_path / "latest")
    assert run_and_step(".") == ((tmp_path / "run").resolve(), 1)


def test_what_is_unreadable_is_named(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name)
    metadata = tmp_path / "one" / "iter_0000001" / ".metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))
    with pytest.raises(ValueError, match=r"iter_0000001 is damaged: \.metadata cannot be read"):
        RunSource(tmp_path / "one")
    sizes = {file.name: file.stat().st_size for file in metadata.parent.iterdir()}
    (metadata.parent / "files.json").write_text(json.dumps(sizes))
    with pytest.raises(ValueError, match=r"iter_0000001 is damaged: \.metadata cannot be read"):
        RunSource(tmp_path / "one")
    (tmp_path / "two" / "run.yaml").write_text(run_from_dict(RUN).to_yaml().replace("preset: tiny", "preset: tinny"))
    with pytest.raises(ValueError, match=r"two/run\.yaml: model\.preset 'tinny' does not exist"):
        RunSource(tmp_path / "two")


def test_a_checkpoint_is_exported_by_its_path(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    first, _ = write_run(tmp_path / "run", 1), write_run(tmp_path / "run", 2)
    path, out = tmp_path / "run" / "iter_0000001", tmp_path / "out"
    assert main(["convert", "export", str(path), str(out), "--step", "2"]) == 2
    assert f"{path} is the checkpoint of step 1, and asked is step 2" in capsys.readouterr().err
    assert main(["convert", "export", str(path), str(out), "--quiet"]) == 0
    assert f"exported step 1 of {tmp_path / 'run'} to" in capsys.readouterr().out
    assert torch.equal(load_released(out)["norm.weight"], first["norm.weight"])
    assert open_checkpoint(path, None)[0].step == 1 and open_checkpoint(tmp_path / "run", None)[0].step == 2
    assert named_checkpoint(tmp_path / "run", 2) == (tmp_path / "run", 2)
    assert named_checkpoint(path, 1) == (tmp_path / "run", 1) and named_checkpoint(out, 1) is None


def test_folders_named_otherwise_are_no_checkpoints(tmp_path):
    """A copy kept by hand is not one that the run counts."""
    write_run(tmp_path, 1)
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_2")
    assert complete_steps(tmp_path) == [1] and run_and_step(tmp_path / "iter_2") is None


def test_commands_that_take_no_run_name_the_one_that_exports_it(tmp_path, capsys, monkeypatch):
    """What is printed works as it stands, and then the command does."""
    folder = tmp_path / "my run"
    folder.mkdir()
    states = {None: write_run(folder, 2), 1: write_run(folder, 1)}
    for step, state in states.items():
        given = folder if step is None else folder / "iter_0000001"
        for before in (["import", str(given), str(tmp_path / "out")], ["verify", str(given)]):
            assert main(["convert", *before]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(
            f"dsv41 convert: {given} is a {'training run' if step is None else 'checkpoint of a'}"
        )
        command = shlex.split(re.findall("`dsv41 (.*)`", message)[0])
        assert main([*command, "--quiet"]) == 0
        assert main(["convert", "verify", f"{folder}-exported", "--quiet"]) == 0
        assert torch.equal(load_released(f"{folder}-exported")["norm.weight"], state["norm.weight"])
        capsys.readouterr()
        assert main(["convert", "verify", f"{folder}-exported", str(given), "--quiet"]) == 2
        assert capsys.readouterr().out == ""  # before it reads the first
        export = ["convert", "export", f"{folder}-exported", str(tmp_path / "out"), "--like", str(given), "--quiet"]
        assert main(export) == 2 and "write one with `dsv41 convert export" in capsys.readouterr().err
        (tmp_path / "my run-exported").rename(tmp_path / f"of {step}")
    monkeypatch.chdir(folder)
    assert main(["convert", "verify", "."]) == 2
    assert f"convert export '{folder}' '{folder}-exported'`" in capsys.readouterr().err
