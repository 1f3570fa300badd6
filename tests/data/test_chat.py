"""Chats: DeepSeek's own text, one document per assistant turn, loss on what the assistant says."""

import json
import re
import sys

import numpy as np
import pytest

from megatron_dsv41.data.chat import read_chats, turns
from megatron_dsv41.data.chat_prep import prepare_chats
from megatron_dsv41.data.prepared import mask_prefix, prepared_paths
from megatron_dsv41.data.tokenizer import train_bpe

pytest.importorskip("deepseek_recipe")

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "a greeting"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "arithmetic"},
    ]
}


def test_every_turn_is_written_as_inference_would_meet_it():
    first, second = turns(CHAT, "here", "max")
    assert first.prompt.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 100 (range 1-100")
    assert first.prompt.endswith("Be brief.<｜User｜>Hi<｜Assistant｜><think>")
    assert first.answer == "a greeting</think>Hello!"
    # Earlier reasoning is not shown again.
    assert second.prompt.endswith(
        "Hi<｜Assistant｜></think>Hello!<｜end▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜><think>"
    )
    assert second.answer == "arithmetic</think>4"
    assert "Reasoning Effort: 50 " in turns(CHAT | {"reasoning_effort": "low"}, "here", "max")[0].prompt
    assert "Reasoning Effort" in turns(CHAT, "here")[0].prompt


def test_the_package_that_writes_them_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "deepseek_recipe", raising=False)
    with pytest.raises(ValueError, match=re.escape(f"{sys.executable} -m pip install 'deepseek-recipe>=0.2'")):
        turns(CHAT, "here")


def test_tool_calls_are_answers():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    chat = {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    (turn,) = turns(chat, "here")
    assert 'invoke name="add"' in turn.answer and 'invoke name="add"' not in turn.prompt


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"chats\.jsonl:1 is not JSON"),
        ('{"text": "x"}', r'chats\.jsonl:1 must be an object with a list "messages"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"chats\.jsonl:1 has no assistant message"),
        ('{"messages": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "y"}]}', "chats.jsonl:1"),
    ],
)
def test_wrong_chats_are_named(tmp_path, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        for where, row in read_chats([path]):
            turns(row, where)


def test_prepared_chats_mask_all_but_the_answers(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = train_bpe(["Be brief. Hi Hello! 2+2? arithmetic a greeting"] * 3, 300, tmp_path / "bpe")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n")
    sidecar = prepare_chats([str(path)], str(tmp_path / "bpe"), str(tmp_path / "chats"), effort="high")
    assert sidecar.documents == 2
    text, mask = (IndexedDataset(str(p)) for p in (tmp_path / "chats", mask_prefix(tmp_path / "chats")))
    for number, answer in enumerate(("a greeting</think>Hello!", "arithmetic</think>4")):
        ids, trained = text[number], mask[number]
        assert len(ids) == len(trained) and ids[-1] == sidecar.eod_id and trained[-1] == 1
        kept = ids[trained == 1][:-1]
        assert tokenizer.backend.decode(kept.tolist(), skip_special_tokens=False) == answer
        assert np.array_equal(np.sort(trained), trained)  # first what is read, then what is answered
    with pytest.raises(ValueError, match="exists: choose another --output"):
        prepare_chats([str(path)], str(tmp_path / "bpe"), str(tmp_path / "chats"))
    assert prepared_paths(tmp_path / "chats").sidecar.exists()
