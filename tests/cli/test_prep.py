import argparse
from pathlib import Path

import pytest

from megatron_dsv41.cli import main, prep
from megatron_dsv41.data.check import open_tokens
from megatron_dsv41.data.prepared import read_sidecar
from megatron_dsv41.data.tokenizer import open_tokenizer

TOKENIZER = Path(__file__).parents[1] / "data" / "parity" / "text_fp32" / "tokenizer.json"


@pytest.fixture
def sources(tmp_path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    for i in range(12):
        (folder / f"m{i:02}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    return folder


def test_folder_of_files_to_tokens(sources, tmp_path, capsys):
    command = f"prep --input {sources} --pattern *.py --tokenizer {TOKENIZER} --output {tmp_path}/data --workers 1"
    assert main([*command.split(), "--validation-documents", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/data: 10 documents, ") and "vocab_size 400, compressed 327" in lines[0]
    assert lines[1].startswith(f"{tmp_path}/data-valid: 2 documents, ")
    assert "0 texts without content skipped" in lines[2] and "tokens/s" in lines[2]
    assert main(command.split()) == 2
    assert "exists: choose another --output" in capsys.readouterr().err


def test_tokenizer_trained_on_the_input(sources, tmp_path, capsys):
    command = f"prep --input {sources} --pattern *.py --tokenizer {tmp_path}/bpe --output {tmp_path}/data --workers 1"
    assert main([*command.split(), "--train-tokenizer", "280"]) == 0
    assert "byte-level BPE of 280 tokens (asked for 280)" in capsys.readouterr().out
    sidecar = read_sidecar(tmp_path / "data")
    tokenizer = open_tokenizer(tmp_path / "bpe")
    assert sidecar.tokenizer_sha256 == tokenizer.sha256 and sidecar.vocab_size == 280
    file = open_tokens(tmp_path / "data")
    first = file.tokens[: file.ends[0] - 1].tolist()
    assert tokenizer.backend.decode(first) == (sources / "m00.py").read_text()
    assert main([*command.split(), "--train-tokenizer", "280"]) == 2
    assert "leave out --train-tokenizer to use it" in capsys.readouterr().err


def test_adopt_takes_no_input(tmp_path, capsys):
    command = f"prep --adopt --tokenizer {TOKENIZER} --output {tmp_path}/data"
    assert main([*command.split(), "--input", "x"]) == 2
    assert "--adopt takes no --input: leave it out" in capsys.readouterr().err
    assert main(command.split()) == 2
    assert "data.bin is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--validation-documents", "3"], ["--text-column", "x"], ["--train-tokenizer", "300"], ["--streaming"]]
)
def test_chats_refuse_options_that_they_would_not_read(tmp_path, capsys, option):
    command = f"prep --chat --input {tmp_path}/chats.jsonl --tokenizer {TOKENIZER} --output {tmp_path}/data"
    assert main([*command.split(), *option]) == 2
    assert f"--chat takes no {option[0]}: leave it out" in capsys.readouterr().err
    assert main(command.split()) == 2
    assert "takes no" not in capsys.readouterr().err


def test_help_names_every_option_that_is_read(capsys):
    parser = argparse.ArgumentParser()
    prep.add_arguments(parser)
    help_text = parser.format_help()
    for option in ("--input", "--validation-fraction", "--special-tokens", "--adopt", "examples:"):
        assert option in help_text
    parsed = parser.parse_args(["--tokenizer", "t", "--output", "o"])
    assert parsed.workers >= 1 and parsed.text_column == "text"
