"""Many distinct prompts made from few: the prompts themselves, then their beginnings. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from outrider_controller.cli.exits import CommandError

from benchmarks.support.prompts import Prompt

# Words of a beginning. Short, because most of the time is prefill.
_LENGTHS = (16, 12, 24, 8, 20, 32, 40, 48)


def assembled(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts with distinct texts, in a fixed random order, so that any first part is a sample.

    If there are not enough, the first words of each are further prompts, whose id contains the number of words. Raises
    CommandError when there are still too few.
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
