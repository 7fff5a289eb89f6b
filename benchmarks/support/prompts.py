"""Prompts for measurements: JSON lines with `turns` or `prompt`, an `id`, and optionally a `category`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.exits import CommandError

# Spec-Bench (Xia et al. 2024) counts the eight categories of MT-bench as one.
_MULTI_TURN = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    category: str
    text: str
    """The first turn."""


def prompts_option(command: Callable[..., Any]) -> Callable[..., Any]:
    path = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option(
        "--prompts", "prompts_file", type=path, required=True, metavar="FILE", help="JSON lines: id, turns or prompt."
    )(command)


def read_prompts(file: Path) -> list[Prompt]:
    """Raises CommandError that names the faulty line."""
    prompts = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
            category = str(row.get("category", "all"))
            prompts.append(Prompt(str(row["id"]), "multi-turn" if category in _MULTI_TURN else category, str(text)))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CommandError(
                f"{file}, line {number}: no prompt with an id ({type(error).__name__}: {error})"
            ) from None
    if not prompts:
        raise CommandError(f"{file}: no prompts")
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts, spread evenly over the categories, and within each over the file."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    shares = _shares({category: len(found) for category, found in by_category.items()}, count)
    return [
        prompt
        for category, found in by_category.items()
        for prompt in (found[i * len(found) // shares[category]] for i in range(shares[category]))
    ]


def _shares(available: dict[str, int], count: int) -> dict[str, int]:
    """Deals `count` out to the categories in turn, as far as they have prompts."""
    shares = dict.fromkeys(available, 0)
    left = min(count, sum(available.values()))
    while left:
        for category, most in available.items():
            if left and shares[category] < most:
                shares[category] += 1
                left -= 1
    return shares
