"""A text that a client expects for the most part, and where the answer stands in it. Pure.

It is a draft like any other: the target judges its tokens. The drafter proposes by it, and the gateway counts by it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Two tokens in a row are where the answer left the prediction and came back; nearest to where it left.
_RUN = 2
# In a row that are not the predicted ones: the answer is elsewhere then.
_MAX_STRAY = 2
_MATCHED_AT_START = 8


class Prediction:
    """Follows an answer from its first token on."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self.num_accepted = 0
        """Tokens of the answer that were predicted, in their places."""
        self._next = 0
        self._matched = _MATCHED_AT_START
        self._stray = 0
        """Tokens since the last that was predicted, or found again."""
        self._last = -1
        self._places: dict[tuple[int, ...], list[int]] | None = None
        """What follows each run of two tokens. Made when it is first needed."""

    @property
    def num_rejected(self) -> int:
        """Predicted tokens that the answer does not have."""
        return max(0, len(self.token_ids) - self.num_accepted)

    @property
    def matched(self) -> int:
        """Tokens in a row that were as predicted, up to here; at least 1."""
        return max(1, self._matched)

    def follow(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these."""
        for token_id in token_ids:
            self._follow(token_id)
            self._last = token_id

    def upcoming(self, count: int) -> tuple[int, ...]:
        """What should come next, at most so much. Nothing where the answer is elsewhere."""
        return self.token_ids[self._next : self._next + count] if self._stray <= _MAX_STRAY else ()

    def _follow(self, token_id: int) -> None:
        if self.token_ids[self._next : self._next + 1] == (token_id,):
            self.num_accepted += 1
            self._next += 1
            self._matched += 1
            self._stray = 0
            return
        self._stray += 1
        if (place := self._found(token_id)) is not None:
            # The run itself was predicted too.
            self.num_accepted += min(self._stray, _RUN)
            self._next, self._matched, self._stray = place, _RUN, 0
        else:
            # As if it stood in the place of the one predicted.
            self._next, self._matched = min(self._next + 1, len(self.token_ids)), 0

    def _found(self, token_id: int) -> int | None:
        if self._places is None:
            self._places = {}
            for place in range(_RUN, len(self.token_ids)):
                self._places.setdefault(self.token_ids[place - _RUN : place], []).append(place)
        places = self._places.get((self._last, token_id))
        if not places:
            return None
        # Of a repetitive prediction they are many. The nearest stands on one side of where the answer left.
        after = bisect_left(places, self._next)
        return min(places[max(0, after - 1) : after + 1], key=lambda place: abs(place - self._next))
