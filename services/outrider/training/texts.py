"""Texts that a user brings, as JSON lines: prompts that the target answers, or answers that exist already."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outrider.samples import SampleStore

Message = dict[str, Any]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class AnsweredText:
    """A prompt with its answer."""

    messages: tuple[Message, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request that a target has recorded, in its token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def read_recorded(store: SampleStore, tenant: str) -> list[Sampled]:
    """The lowest acceptance first. Raises ValueError where there is no sample with text, or one cannot be read."""
    found = [
        Sampled(tuple(record["prompt"]), (*record.get("committed", ()), *record["output"]))
        for record in store.read(tenant)
        if "prompt" in record
    ]
    if not found:
        raise ValueError(f"{store.directory}: no samples of {tenant} with their text")
    return found


def read_prompts(file: Path) -> list[tuple[Message, ...]]:
    """Each line has `prompt`, a text; or `turns`, of which the first is used; or `messages`, the last of them a
    user's. Raises ValueError that names file, line and field."""
    return read_lines(file, prompt_of)


def read_samples(file: Path) -> list[AnsweredText]:
    """Each line has `messages`, the last of them the assistant's; or a prompt as in read_prompts, and `answer`. Raises
    ValueError that names file, line and field."""
    return read_lines(file, answered_of)


def read_lines(file: Path, read: Callable[[dict[str, Any]], Read]) -> list[Read]:
    """What `read` makes of each line, a JSON object. Raises ValueError that names file and line."""
    found = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            found.append(read(row))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{file}: no lines")
    return found


def prompt_of(row: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" in row:
        return _messages(row["messages"], last="user")
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns: must be a list of texts")
        return ({"role": "user", "content": _text("turns[0]", turns[0])},)
    return ({"role": "user", "content": _text("prompt", row.get("prompt"))},)


def answered_of(row: dict[str, Any]) -> AnsweredText:
    if "answer" in row:
        return AnsweredText(prompt_of(row), _text("answer", row["answer"]))
    *before, last = _messages(row.get("messages"), last="assistant")
    return AnsweredText(tuple(before), last["content"])


def _messages(value: Any, *, last: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError("messages: must be a list of objects with role and content")
    for number, message in enumerate(value):
        _text(f"messages[{number}].content", message.get("content"))
    if value[-1].get("role") != last:
        raise ValueError(f"messages[{len(value) - 1}].role: must be {last}")
    return tuple(value)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field}: must be a text")
    return value


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """As the target sees a request: through its chat template, or the bare text of a model without one."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(str(messages[-1]["content"])))
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))
