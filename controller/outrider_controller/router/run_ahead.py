"""How far a draft guesses on while its guess is verified. Pure.

It follows from times: as many tokens as the draft computes until the next commit can be there.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Another setting is a message, so it is found anew only after so many rounds.
_ROUNDS_BETWEEN = 8
# What a draft takes is the middle one of so many answers: the first took it the prompt too, and one after a rest all
# that was committed meanwhile.
_NUM_ANSWERS = 9


@dataclass(slots=True)
class RunAhead:
    """One request's draft while its guess is verified."""

    most_tokens: int
    num_tokens: int = field(init=False)
    """How far beyond its guess the draft may go."""
    _rounds: int = 0
    """Since that was found."""
    _answers: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_ANSWERS))
    """What the last ones took the draft, in µs, and their tokens."""

    def __post_init__(self) -> None:
        self.num_tokens = self.most_tokens

    def forget(self) -> None:
        """Another draft was opened."""
        self._answers.clear()
        self._rounds = 0
        self.num_tokens = self.most_tokens

    def answered(self, num_tokens: int, compute_us: int) -> None:
        """What an answer took the draft, without the way and the waiting."""
        if num_tokens:
            self._answers.append((compute_us, num_tokens))

    def round(self, *, step_us: float, turnaround_us: int, rounds: int = 1) -> None:
        """Some rounds in which the draft was at work. `step_us` and `turnaround_us`: of late."""
        self._rounds += rounds
        if self._rounds >= _ROUNDS_BETWEEN:
            self._rounds = 0
            self._find(step_us, turnaround_us)

    def _find(self, step_us: float, turnaround_us: int) -> None:
        """How far beyond its guess the draft has time for: from its answer until it has the next commit.

        That is a step of the target and the way there and back.
        """
        if not (self._answers and step_us and turnaround_us):
            return
        token_us = median(us / num_tokens for us, num_tokens in self._answers)
        free_us = step_us + max(turnaround_us - median(us for us, _ in self._answers), 0.0)
        self.num_tokens = min(self.most_tokens, math.ceil(free_us / max(token_us, 1.0)))
