"""Prompts from a file, in the forms of public sets: Spec-Bench, MT-bench, ShareGPT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider_controller.cli.exits import CommandError

from benchmarks.support.prompts import Prompt

_HUMAN = ("human", "user")


def read_prompts(file: Path) -> list[Prompt]:
    """The first thing that a person says in each row; a conversation without any is passed over.

    Raises CommandError that names the faulty row.
    """
    prompts = []
    for number, row in _rows(file):
        try:
            if (text := _text(row)) is not None:
                prompts.append(Prompt(str(row.get("id", number)), str(row.get("category", "all")), text))
        except (AttributeError, LookupError, TypeError) as error:
            raise CommandError(
                f"{file}, row {number}: no prompt, turns or conversations ({type(error).__name__}: {error})"
            ) from None
    if not prompts:
        raise CommandError(f"{file}: no prompts")
    return prompts


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a JSON array, or of JSON lines, counted from 1."""
    text = file.read_text(encoding="utf-8")
    array = text.lstrip().startswith("[")
    for number, part in enumerate([text] if array else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            row = json.loads(part)
        except ValueError as error:
            raise CommandError(f"{file}, {'array' if array else f'row {number}'}: {error}") from None
        if array:
            yield from enumerate(row, 1)
        else:
            yield number, row


def _text(row: Any) -> str | None:
    if "conversations" in row:
        return next((str(turn["value"]) for turn in row["conversations"] if turn["from"] in _HUMAN), None)
    return str(row["turns"][0] if "turns" in row else row["prompt"])
