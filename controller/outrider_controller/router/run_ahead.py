"""How far a draft continues beyond its proposal while that is verified. Pure.

The number follows from times: as many tokens as the draft can compute until it can receive the next commit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# A new setting costs a message, so it is computed only once in this many rounds.
_ROUNDS_BETWEEN = 8
# The draft's time is the median of this many answers: the first includes the prefill, and one after a rest includes
# the tokens committed meanwhile.
_NUM_ANSWERS = 9


@dataclass(slots=True)
class RunAhead:
    """The run-ahead of one request's draft."""

    most_tokens: int
    num_tokens: int = field(init=False)
    """Tokens that the draft may compute beyond its proposal."""
    _rounds: int = 0
    """Since `num_tokens` was computed."""
    _answers: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_ANSWERS))
    """Of the last answers: tokens and compute time in µs."""

    def __post_init__(self) -> None:
        self.num_tokens = self.most_tokens

    def forget(self) -> None:
        """Another draft was opened."""
        self._answers.clear()
        self._rounds = 0
        self.num_tokens = self.most_tokens

    def answered(self, num_tokens: int, compute_us: int) -> None:
        """Adds an answer. `compute_us` excludes network and waiting."""
        if num_tokens:
            self._answers.append((compute_us, num_tokens))

    def round(self, *, step_us: float, turnaround_us: int, rounds: int = 1) -> None:
        """Some rounds in which the draft worked. `step_us` and `turnaround_us`: of recent rounds."""
        self._rounds += rounds
        if self._rounds >= _ROUNDS_BETWEEN:
            self._rounds = 0
            self._find(step_us, turnaround_us)

    def _find(self, step_us: float, turnaround_us: int) -> None:
        """Sets `num_tokens` from the time between the draft's answer and its next commit.

        That time is a step of the target and a network round trip.
        """
        if not (self._answers and step_us and turnaround_us):
            return
        token_us = median(us / num_tokens for us, num_tokens in self._answers)
        free_us = step_us + max(turnaround_us - median(us for us, _ in self._answers), 0.0)
        self.num_tokens = min(self.most_tokens, math.ceil(free_us / max(token_us, 1.0)))
