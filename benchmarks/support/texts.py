"""Many distinct prompts made of few: the prompts as they are, then their beginnings. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from outrider_controller.cli.exits import CommandError

from benchmarks.support.prompts import Prompt

# Words of a beginning. Short ones: most of the time goes into reading prompts.
_LENGTHS = (16, 12, 24, 8, 20, 32, 40, 48)


def assembled(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts with distinct texts, in an order that is random but always the same: any first part is a sample.

    Where there are not enough, the first words of each are prompts of their own; their id says how many words.
    Raises CommandError when even that is too few.
    """
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.text, prompt)
    for length in _LENGTHS:
        for prompt in prompts:
            if len(found) >= count:
                break
            words = prompt.text.split()
            if len(words) > length:
                text = " ".join(words[:length])
                found.setdefault(text, replace(prompt, id=f"{prompt.id}/{length}", text=text))
    if len(found) < count:
        raise CommandError(f"{len(prompts)} prompts and their beginnings make {len(found)} distinct ones, not {count}")
    chosen = list(found.values())[:count]
    random.Random(0).shuffle(chosen)
    return chosen
