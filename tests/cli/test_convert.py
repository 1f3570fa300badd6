"""The convert command end to end, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dsv41.checkpoint.native_record import NativeRecord
from megatron_dsv41.cli import main
from megatron_dsv41.cli.convert import parse_size
from megatron_dsv41.testing.released import folder_bytes

ROOT = Path(__file__).parents[2]
PARITY = ROOT / "tests" / "data" / "parity"


def test_import_export_verify(tmp_path, capsys):
    source = PARITY / "released_layout"
    native, back = tmp_path / "native", tmp_path / "back"
    assert main(["convert", "import", str(source), str(native), "--quiet"]) == 0
    assert main(["convert", "export", str(native), str(back), "--quiet"]) == 0
    expected = folder_bytes(source)
    del expected["expected.safetensors"]
    assert folder_bytes(back) == expected
    assert len(NativeRecord.load(native).hash_digest or "") == 64
    assert main(["convert", "verify", str(native), str(back)]) == 0
    assert "0 differ" in capsys.readouterr().out


def test_processes_of_this_machine_share_a_conversion(tmp_path):
    """Into a distributed checkpoint and out of it again."""
    source, native, back = PARITY / "released_layout", tmp_path / "native", tmp_path / "back"
    layout = ["--layout", "tp=2,pp=2,ep=2,engram=3", "--processes", "2", "--max-memory", "8GiB", "--quiet"]
    assert main(["convert", "import", str(source), str(native), *layout]) == 0
    assert main(["convert", "export", str(native), str(back), "--quiet"]) == 0
    expected = folder_bytes(source)
    del expected["expected.safetensors"]
    assert folder_bytes(back) == expected


def test_verify_says_no(tmp_path, capsys):
    assert main(["convert", "export", str(PARITY / "text_fp32"), str(tmp_path / "bf16"), "--storage", "bf16"]) == 0
    assert main(["convert", "verify", str(PARITY / "text_fp32"), str(tmp_path / "bf16"), "--quiet"]) == 1
    assert "differ" in capsys.readouterr().out


def test_another_tokenizer_is_noticed(tmp_path, capsys):
    """Same number of classes, another map: nothing would crash, every Engram row would be wrong."""
    assert main(["convert", "import", str(PARITY / "released_layout"), str(tmp_path / "native"), "--quiet"]) == 0
    path = tmp_path / "native" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    # Swap two tokens of different classes.
    one, two = "b", "c"
    vocab[one], vocab[two] = vocab[two], vocab[one]
    path.write_text(json.dumps(tokenizer))
    assert main(["convert", "verify", str(tmp_path / "native")]) == 1
    assert "hash: native.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "{tmp}/nowhere", "{tmp}/out"], "no config.json"),
        (["import", "{case}", "{case}"], "is not empty"),
        (["import", "{case}", "{tmp}/out", "--max-memory", "12x"], "is not a size"),
        (["export", "{case}", "{tmp}/out", "--shards", "many"], "is not a size"),
        (["verify", "{case}", "{tmp}/nowhere"], "no config.json"),
        (["import", "{case}", "{tmp}/out", "--layout", "tp=2,cp=2"], "'cp=2' must be one of tp, pp"),
        (["import", "{case}", "{tmp}/out", "--layout", "ep=3"], "parallel.ep 3 does not divide n_routed_experts"),
        (["import", "{case}", "{tmp}/out", "--layout", "tp=2", "--storage", "source"], "storage must be 'config'"),
        (["import", "{case}", "{tmp}/out", "--processes", "0"], "--processes must be at least 1"),
        (["import", "{pointer}", "{tmp}/out"], "its weights lie in"),
        (["export", "{case}", "{tmp}/out", "--merge", "{case}"], "is not a LoRA adapter"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, arguments, message):
    filled = [a.format(tmp=tmp_path, case=PARITY / "text_fp32", pointer=PARITY / "packed_fp32") for a in arguments]
    assert main(["convert", *filled]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("500", 500), ("5GB", 5 * 10**9), ("4GiB", 4 * 2**30), ("0.5G", 5 * 10**8), ("2 kb", 2000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_tool_is_the_command():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for action in ((), ("import",), ("export",), ("verify",)):
        command = [sys.executable, ROOT / "tools" / "convert_checkpoint.py", *action, "--help"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0 and f"dsv41 convert {' '.join(action)}".strip() in result.stdout
