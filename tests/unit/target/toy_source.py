"""A kind of draft that is not shipped: one file and its registration are all that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.lookup import LookupDrafts
from outrider.drafting.source import DraftSource, register
from outrider.sequence.spec import SequenceSpec

NAME = "toy"
TEXTS: dict[tuple[int, ...], list[int]] = {}
"""Prompt → prompt and answer."""


@register(NAME)
def toys() -> DraftSource:
    return LookupDrafts(NAME, Toy)


class Toy:
    """Knows the answer, and says every third token wrong."""

    def __init__(self, opening: SequenceSpec) -> None:
        self._text = TEXTS[tuple(opening.prompt)]
        self._length = len(opening.prompt) + len(opening.committed)

    def extend(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def find(self, count: int) -> tuple[Sequence[int], int]:
        found = self._text[self._length : self._length + count]
        return [token + (position % 3 == 2) for position, token in enumerate(found, self._length)], 4
