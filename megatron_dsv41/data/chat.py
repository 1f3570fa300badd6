"""Chats to prepared data: every assistant turn as the model would meet it, trained on what it answers (SPEC 15).

The text of a conversation is made by the package `deepseek-recipe`, DeepSeek's own encoding, reasoning-effort line
included. It shows earlier assistant turns without their reasoning, so each turn becomes a document of its own: the
conversation up to it, read, and the turn with its reasoning and end token, trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_dsv41.data.tokenizer import OpenTokenizer

MODEL = "DeepSeek-V4.1-Flash"
EFFORTS = ("low", "high", "xhigh", "max")


class Turn(NamedTuple):
    """What is read and what is answered; both are text with special tokens."""

    prompt: str
    answer: str


class Example(NamedTuple):
    """ids int64 [tokens] with the end token; trained uint8 [tokens]: 1 for the answer."""

    ids: np.ndarray
    trained: np.ndarray


def read_chats(paths: Sequence[str | Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, row) of JSON-lines files whose rows have `messages`. ValueError for any other line."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"chat file {path} does not exist")
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where} is not JSON: {error}") from error
                if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
                    raise ValueError(f'{where} must be an object with a list "messages"')
                yield where, row


def turns(row: Mapping[str, Any], where: str, effort: str | None = None) -> list[Turn]:
    """The assistant turns of one chat.

    row: a Chat Completions request: `messages` (role, content, reasoning_content, tool_calls), and where wanted
    `tools`, `reasoning_effort`, `thinking`. effort: for rows that name none. ValueError for what the encoding refuses
    and for chats without an assistant turn, and without deepseek-recipe.
    """
    request = {key: value for key, value in row.items() if key != "messages"} | {"model": MODEL}
    if effort is not None:
        request.setdefault("reasoning_effort", effort)
    found = []
    for number, message in enumerate(row["messages"]):
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            before = {**request, "messages": list(row["messages"][:number])}
            found.append(_turn(before, message, f"{where}, message {number}"))
    if not found:
        raise ValueError(f"{where} has no assistant message: there is nothing to train")
    return found


def encode(turn: Turn, tokenizer: OpenTokenizer, eod_id: int) -> Example:
    """Token ids of one turn, special tokens parsed, and which of them are trained: the answer and the end token."""
    parts = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in turn]
    ids = np.array([*parts[0], *parts[1], eod_id], dtype=np.int64)
    trained = np.zeros(len(ids), dtype=np.uint8)
    trained[len(parts[0]) :] = 1
    return Example(ids, trained)


def _recipe() -> Any:
    try:
        import deepseek_recipe
    except ModuleNotFoundError as error:
        raise ValueError(
            "chats need the package deepseek-recipe, which is not installed: "
            f"{sys.executable} -m pip install 'deepseek-recipe>=0.2'"
        ) from error
    return deepseek_recipe


def _turn(before: Mapping[str, Any], message: Mapping[str, Any], where: str) -> Turn:
    recipe = _recipe()
    try:
        asked = recipe.ChatCompletionRequest(dict(before)).convert(recipe.ConversionOptions()).conversation
        calls = [
            recipe.ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        # A turn that is continued is the only one that is written with its reasoning and without its end.
        answer = recipe.AssistantMessage(
            message.get("content") or "", message.get("reasoning_content"), calls or None, prefix=True
        )
        settings = {
            name: getattr(asked, name) for name in ("thinking_mode", "tools", "tool_choice", "reasoning_effort")
        }
        encoding = recipe.DeepseekV41Encoding()
        prompt = encoding.render_conversation(asked).prompt
        answered = recipe.Conversation([*asked.messages, answer], **settings)
        whole = encoding.render_conversation(answered).prompt
    except (recipe.ConversionError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not whole.startswith(prompt):
        raise ValueError(f"{where} changes how the conversation before it is written")
    return Turn(prompt, whole[len(prompt) :])
