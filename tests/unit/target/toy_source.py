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

    def __init__(self, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self._text, self._tokens = TEXTS[tuple(spec.prompt)], tokens

    def find(self, count: int) -> tuple[Sequence[int], int]:
        length = len(self._tokens)
        found = self._text[length : length + count]
        return [token + (position % 3 == 2) for position, token in enumerate(found, length)], 4
