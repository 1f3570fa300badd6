import json
from pathlib import Path

import pytest

from megatron_dsv41.cli import main

PARITY = Path(__file__).parents[1] / "data" / "parity" / "text_fp32"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 30)
    command = f"prep --input {folder}/text.txt --tokenizer {PARITY}/tokenizer.json --output {folder}/data --workers 1"
    assert main(command.split()) == 0
    return folder / "data"


def test_a_released_folder_on_two_domains(prefix, capsys):
    command = ["evaluate", str(PARITY), "--data", f"code={prefix}", "--data", str(prefix), "--seq-length", "32"]
    assert main([*command, "--limit", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = found["domains"]
    assert (first.pop("domain"), second.pop("domain")) == ("code", str(prefix)) and first == second
    assert first["tokens"] <= 64 < first["text_bytes"] and first["bits_per_byte"] > 0
    assert main([*command, "--limit", "64"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "bits per byte"
    assert [line.split()[0] for line in lines] == ["code", str(prefix)]  # a row is a line, and a name is whole


def test_mistakes_are_named(prefix, tmp_path, capsys):
    def error(*arguments):
        assert main(["evaluate", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "names no data.valid: give --data PREFIX" in error(PARITY)
    assert "is not a folder with a checkpoint" in error(tmp_path / "absent", "--data", prefix)
    assert "--rows must be positive, got 0" in error(PARITY, "--data", prefix, "--rows", 0)
    assert "--data names 'a' twice" in error(PARITY, "--data", f"a={prefix}", "--data", f"a={prefix}")
    assert "--device cud cannot be used here" in error(PARITY, "--data", prefix, "--device", "cud")
    assert "is missing" in error(PARITY, "--data", tmp_path / "absent")
    assert "give --tokenizer" in error(PARITY, "--data", prefix, "--tokenizer", "deepseek")
