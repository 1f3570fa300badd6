import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_dsv41.data.check import check_prepared, open_tokens
from megatron_dsv41.data.prep import PrepOptions, adopt, prepare, valid_prefix
from megatron_dsv41.data.prepared import prepared_paths, read_sidecar
from megatron_dsv41.data.sources import SourceOptions
from megatron_dsv41.data.synthetic import stdlib_texts
from megatron_dsv41.data.tokenizer import open_tokenizer
from megatron_dsv41.data.writer import token_dtype

EOD = 1
OUTPUTS = (".bin", ".idx", ".json", ".token_map.npz")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """1,200 JSON lines: pieces of the standard library, every tenth one without content."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    text = next(t for t in stdlib_texts() if len(t) > 50_000)
    pieces = [f"{i} {text[40 * i : 40 * i + 10 + i % 200]}" if i % 10 else " " for i in range(1200)]
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


@pytest.fixture
def options(tmp_path, corpus, tokenizer_path) -> PrepOptions:
    source = SourceOptions(inputs=[str(corpus)])
    return PrepOptions(source=source, tokenizer=str(tokenizer_path), output=str(tmp_path / "out" / "data"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def contents(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared_paths(prefix)}


def test_every_document_is_there_once_with_its_end(options, corpus, small_config):
    (sidecar,) = prepare(options).values()
    assert sidecar.documents == 1080 and sidecar.skipped == 120
    file = open_tokens(options.output)
    assert len(file.tokens) == sidecar.tokens == file.ends[-1]
    backend = open_tokenizer(options.tokenizer).backend
    texts = [json.loads(line)["text"] for line in corpus.open()]
    documents = np.split(np.asarray(file.tokens), file.ends[:-1])
    for text, ids in zip([t for t in texts if t.strip()], documents, strict=True):
        assert ids[-1] == EOD and (ids == EOD).sum() == 1
        assert ids[:-1].tolist() == backend.encode(text, add_special_tokens=False).ids
    assert check_prepared(options.output, small_config) == sidecar
    assert names(Path(options.output).parent) == ["data" + end for end in sorted(OUTPUTS)]


def test_megatron_reads_it_back(options):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepare(options)
    dataset, file = IndexedDataset(options.output), open_tokens(options.output)
    assert np.array_equal(np.cumsum(dataset.sequence_lengths), file.ends)
    assert dataset.sequence_lengths.sum() * 2 == prepared_paths(options.output).bin.stat().st_size
    assert np.array_equal(np.concatenate(dataset[:]), file.tokens)


def test_two_workers_write_the_same_bytes_as_one(options, tmp_path):
    one = dataclasses.replace(options, validation_documents=50)
    two = dataclasses.replace(one, output=str(tmp_path / "two" / "data"), workers=2)
    prepare(one)
    prepare(two)
    for of in (str, valid_prefix):
        assert contents(of(one.output)) == contents(of(two.output))


@pytest.mark.parametrize("split", [{"validation_documents": 50}, {"validation_fraction": 0.1}])
def test_validation_part(options, split, small_config, tmp_path):
    whole = dataclasses.replace(options, output=str(tmp_path / "whole"))
    prepare(whole)
    sidecars = prepare(dataclasses.replace(options, **split))
    parts = [open_tokens(prefix) for prefix in (options.output, valid_prefix(options.output))]
    assert len(parts[1].ends) == 50 if "validation_documents" in split else 70 < len(parts[1].ends) < 150
    assert sidecars["validation"] == check_prepared(valid_prefix(options.output), small_config)
    documents = [d.tobytes() for p in parts for d in np.split(np.asarray(p.tokens), p.ends[:-1])]
    file = open_tokens(whole.output)
    assert sorted(documents) == sorted(d.tobytes() for d in np.split(np.asarray(file.tokens), file.ends[:-1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"validation_fraction": 1.0}, r"--validation-fraction must be in \[0, 1\), got 1.0"),
        ({"validation_documents": -1}, "must not be negative, got -1"),
        ({"validation_documents": 1, "validation_fraction": 0.1}, "give one of them"),
        ({"validation_documents": 5000}, "no document for the train part"),
        ({"validation_fraction": 1e-9}, "no document for the validation part"),
        ({"tokenizer": "/no/where"}, "tokenizer '/no/where': there is no file"),
        ({"eod_token": "<stop>"}, "has no token '<stop>'"),
        ({"source": SourceOptions(inputs=["./nothing.jsonl"])}, "no file or folder is there"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(options, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(dataclasses.replace(options, **changes))
    assert names(Path(options.output).parent) == []


def test_bad_input_in_the_middle_leaves_nothing(options, corpus, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(corpus.read_text() + "{\n")
    with pytest.raises(ValueError, match="bad.jsonl:1201 is not a line of JSON"):
        prepare(dataclasses.replace(options, source=SourceOptions(inputs=[str(bad)])))
    assert names(Path(options.output).parent) == []


@pytest.mark.parametrize("end", OUTPUTS)
def test_existing_output_is_kept(options, end):
    path = Path(options.output + end)
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ValueError, match=f"data{end} exists: choose another --output, or pass --overwrite"):
        prepare(options)
    assert path.read_text() == "precious" and len(names(path.parent)) == 1


def test_overwrite_replaces_everything(options, small_config):
    prepare(options)
    before = contents(Path(options.output))
    other = SourceOptions(inputs=options.source.inputs, max_bytes=5000)
    prepare(dataclasses.replace(options, source=other, overwrite=True))
    after = contents(Path(options.output))
    assert all(before[name] != after[name] for name in before if not name.endswith(".npz"))
    check_prepared(options.output, small_config)


def test_overwrite_does_not_train_on_old_validation_documents(options):
    prepare(dataclasses.replace(options, validation_documents=5))
    with pytest.raises(ValueError, match="is the validation part of the data to be replaced"):
        prepare(dataclasses.replace(options, overwrite=True))
    prepare(dataclasses.replace(options, overwrite=True, validation_documents=6))
    assert read_sidecar(valid_prefix(options.output)).documents == 6


def test_input_that_cannot_fit_is_refused(options, tmp_path, monkeypatch):
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as stream:
        stream.truncate(1 << 43)  # a sparse file of 8 TiB
    with pytest.raises(OSError, match="GB free, the tokens of 8796.09 GB of input need at least 1759.22 GB"):
        prepare(dataclasses.replace(options, source=SourceOptions(inputs=[str(huge)])))
    assert names(Path(options.output).parent) == []


def test_token_type_follows_the_vocabulary():
    assert [token_dtype(n) for n in (400, 65499, 65500, 129280)] == ["uint16", "uint16", "int32", "int32"]


def test_adopted_data(options, tmp_path, small_config):
    """.bin/.idx made by Megatron's own tools need a sidecar to be trained on."""
    prepare(options)
    paths = prepared_paths(options.output)
    made = read_sidecar(options.output)
    with pytest.raises(ValueError, match="token_map.npz exists"):
        adopt(options.output, options.tokenizer)
    paths.sidecar.unlink()
    paths.token_map.unlink()
    adopted = adopt(options.output, options.tokenizer)
    same = {"source": made.source, "skipped": made.skipped}
    assert dataclasses.replace(adopted, **same) == made == dataclasses.replace(made, **same)
    assert check_prepared(options.output, small_config) == adopted
    with pytest.raises(ValueError, match="not with the end-of-document token 2"):
        adopt(options.output, options.tokenizer, "<pad>", overwrite=True)


def start(options: PrepOptions, *more: str) -> subprocess.Popen:
    arguments = ["--input", *options.source.inputs, "--tokenizer", options.tokenizer, "--output", options.output]
    command = [sys.executable, "-m", "megatron_dsv41", "prep", *arguments, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(condition, seconds: float = 240.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_data_and_no_process(options, sent):
    stdlib = dataclasses.replace(options, source=SourceOptions(inputs=["python-stdlib"]))
    folder = Path(options.output).parent
    run = start(stdlib, "--workers", "2")
    wait_for(lambda: len(psutil.Process(run.pid).children()) >= 3 and names(folder))  # tracker and two workers
    children = psutil.Process(run.pid).children()
    run.send_signal(sent)
    _, errors = run.communicate(timeout=240)
    assert run.returncode == (-9 if sent == signal.SIGKILL else 143), errors
    _, still_there = psutil.wait_procs(children, timeout=60)
    assert not still_there
    left = names(folder)
    assert [name for name in left if not name.startswith(".data.staging-")] == []
    assert bool(left) == (sent == signal.SIGKILL)


def test_a_run_after_a_killed_one_says_what_is_left(options, capsys):
    left = Path(options.output).parent / ".data.staging-x1"
    left.mkdir(parents=True)
    prepare(options)
    assert "data.staging-x1'] belongs to a run that was killed" in capsys.readouterr().err
    assert left.exists()


def test_a_full_disk_leaves_nothing_and_says_so(options):
    # `prlimit` on the child, not here: the limit would also stop what pytest prints when that goes to a file.
    run = start(options)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (30_000, 30_000))
    _, errors = run.communicate(timeout=240)
    assert run.returncode != 0
    assert "File too large while writing to" in errors and "free some space, raise the quota" in errors
    assert names(Path(options.output).parent) == []


def test_workers_leave_the_environment_alone(options):
    from torch._inductor import config  # whoever imports it first sets a variable of its own

    assert config
    before = dict(os.environ)
    prepare(options)
    assert dict(os.environ) == before
