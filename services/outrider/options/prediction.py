"""An output that the client predicts (OpenAI's predicted outputs), and the position of the answer in it. Pure.

Its tokens are verified like any draft. The drafter proposes from it, and the gateway counts with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Two predicted tokens in a row mean that the answer is back in the prediction, at their place nearest to where it left.
_RUN = 2
# After more unpredicted tokens in a row than this, nothing is proposed from the prediction.
_MAX_STRAY = 2
_MATCHED_AT_START = 8


class Prediction:
    """Follows an answer from its first token on."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self.num_accepted = 0
        """Tokens of the answer that followed the prediction."""
        self._next = 0
        self._matched = _MATCHED_AT_START
        self._stray = 0
        """Tokens since the last predicted one."""
        self._last = -1
        self._places: dict[tuple[int, ...], list[int]] | None = None
        """Positions after each run of two tokens. Built at the first use."""

    @property
    def num_rejected(self) -> int:
        return max(0, len(self.token_ids) - self.num_accepted)

    @property
    def matched(self) -> int:
        """Length of the current run of predicted tokens; at least 1."""
        return max(1, self._matched)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._extend(token_id)
            self._last = token_id

    def upcoming(self, count: int) -> tuple[int, ...]:
        """At most `count` predicted next tokens. None when the answer has left the prediction."""
        return self.token_ids[self._next : self._next + count] if self._stray <= _MAX_STRAY else ()

    def _extend(self, token_id: int) -> None:
        if self.token_ids[self._next : self._next + 1] == (token_id,):
            self.num_accepted += 1
            self._next += 1
            self._matched += 1
            self._stray = 0
            return
        self._stray += 1
        if (place := self._found(token_id)) is not None:
            # The tokens of the run were predicted too.
            self.num_accepted += min(self._stray, _RUN)
            self._next, self._matched, self._stray = place, _RUN, 0
        else:
            # Treated as a substitution of the predicted token.
            self._next, self._matched = min(self._next + 1, len(self.token_ids)), 0

    def _found(self, token_id: int) -> int | None:
        if self._places is None:
            self._places = {}
            for place in range(_RUN, len(self.token_ids)):
                self._places.setdefault(self.token_ids[place - _RUN : place], []).append(place)
        places = self._places.get((self._last, token_id))
        if not places:
            return None
        # A repetitive prediction has many. The nearest is next to the place where the answer left.
        after = bisect_left(places, self._next)
        return min(places[max(0, after - 1) : after + 1], key=lambda place: abs(place - self._next))
