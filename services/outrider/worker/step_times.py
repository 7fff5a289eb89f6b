"""What a prompt token and a decoding row add to a step's time, from steps of different make-up. Pure.

Published with the lease: by these two a router weighs a cached prefix against a busy worker.
"""

from __future__ import annotations

from dataclasses import dataclass

# Forgetting per step: the last 200 count.
_KEEP = 0.995
# As many rows² of variance are worth as much as the guess that a row takes its share of the step.
_PRIOR = 4.0


@dataclass(slots=True)
class StepTimes:
    """A line through the last steps: seconds = base + prompt tokens * prefill_token_s + rows * row_s."""

    _weight: float = 0.0
    _prompt: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    """Means."""
    _prompt2: float = 0.0
    _rows2: float = 0.0
    _prompt_rows: float = 0.0
    _prompt_seconds: float = 0.0
    _rows_seconds: float = 0.0
    """Sums of products of what differs from the means."""

    def took(self, *, prompt_tokens: int, rows: int, seconds: float) -> None:
        """One step, of tokens of prompts and of rows that decode or verify."""
        if seconds <= 0 or not (prompt_tokens or rows):
            return
        self._weight = _KEEP * self._weight + 1
        share = 1 / self._weight
        prompt, row, second = prompt_tokens - self._prompt, rows - self._rows, seconds - self._seconds
        self._prompt += share * prompt
        self._rows += share * row
        self._seconds += share * second
        # Welford: one factor by the mean before, one by the mean after.
        self._prompt2 = _KEEP * self._prompt2 + prompt * (prompt_tokens - self._prompt)
        self._rows2 = _KEEP * self._rows2 + row * (rows - self._rows)
        self._prompt_rows = _KEEP * self._prompt_rows + prompt * (rows - self._rows)
        self._prompt_seconds = _KEEP * self._prompt_seconds + prompt * (seconds - self._seconds)
        self._rows_seconds = _KEEP * self._rows_seconds + row * (seconds - self._seconds)

    @property
    def _slopes(self) -> tuple[float, float]:
        """Of prompt tokens and rows, drawn towards an equal share of the step for every token in it."""
        usual = self._seconds / (self._prompt + self._rows) if self._weight else 0.0
        prompt2, rows2 = self._prompt2 + _PRIOR, self._rows2 + _PRIOR
        prompt, rows = self._prompt_seconds + _PRIOR * usual, self._rows_seconds + _PRIOR * usual
        determinant = prompt2 * rows2 - self._prompt_rows**2
        return (
            max(0.0, (prompt * rows2 - rows * self._prompt_rows) / determinant),
            max(0.0, (rows * prompt2 - prompt * self._prompt_rows) / determinant),
        )

    @property
    def prefill_token_ns(self) -> int:
        """0 while nothing is known."""
        return round(self._slopes[0] * 1e9)

    @property
    def row_ns(self) -> int:
        """0 while nothing is known."""
        return round(self._slopes[1] * 1e9)
