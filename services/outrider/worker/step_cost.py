"""What one more row of a step takes, and one more token of a prompt: from steps of different make-up. Pure.

On hardware that waits for memory a row is all but free; where a step is bound by arithmetic, as on a CPU or in a full
batch, it is not. By that a drafted token is worth its row or not, a router weighs a cached prefix against a busy
worker, and a step's time is divided among its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

# Forgetting per step: the last 100 count. The slope is forgotten as steps of other sizes come, and else slowly: where
# no drafted row pays all steps are alike, and what a row costs must not be forgotten for that, but be looked at again.
_KEEP, _KEEP_ALIKE = 0.99, 0.9995
# Before anything was seen: what is not the rows' of a step takes as long as so many rows. That counts as much as so
# many steps whose rows vary by two.
_PRIOR_BASE_ROWS, _PRIOR_STEPS, _PRIOR_VARIANCE = 19.0, 10.0, 4.0


@dataclass(frozen=True, slots=True)
class StepShares:
    """How one step's time is divided, in seconds: all parts together are the step."""

    sequence_s: float
    """Of each sequence, whatever it runs: its part of what the step takes without rows."""
    prompt_token_s: float
    row_s: float

    def of(self, *, prompt_tokens: int, rows: int) -> float:
        return self.sequence_s + prompt_tokens * self.prompt_token_s + rows * self.row_s


@dataclass(slots=True)
class StepCost:
    """A line through the last steps that only decode and verify. What others take beyond it, their prompts take."""

    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _tokens: float = 0.0
    """Means."""
    _variance: float = 0.0
    """Of the rows, summed over steps."""
    _covariance: float = 0.0
    """Of rows and seconds, likewise."""
    _prompt_tokens: float = 0.0
    _prompt_seconds: float = 0.0
    """Sums over the last steps with prompts."""

    def took(self, *, rows: int, seconds: float, tokens: int = 0, prompt_tokens: int = 0) -> None:
        """One step: of so many rows that decode or verify, and tokens of prompts, which brought so many tokens."""
        if seconds <= 0 or not (rows or prompt_tokens):
            return
        if prompt_tokens:
            decoding_s = self._seconds + self.row_s * (rows - self._rows)
            self._prompt_tokens = _KEEP * self._prompt_tokens + prompt_tokens
            self._prompt_seconds = _KEEP * self._prompt_seconds + seconds - decoding_s
            return
        self._weight = _KEEP * self._weight + 1
        share = 1 / self._weight
        aside = rows - self._rows
        self._rows += share * aside
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)
        # Welford: one factor by the mean before, one by the mean after.
        varies = aside * (rows - self._rows)
        informs = varies * self._weight / (self._variance + _PRIOR_STEPS * _PRIOR_VARIANCE)
        kept = min(_KEEP_ALIKE, _KEEP ** min(1.0, informs))
        self._variance = kept * self._variance + varies
        self._covariance = kept * self._covariance + aside * (seconds - self._seconds)

    @property
    def row_share(self) -> float:
        """What a row more takes, in steps: the slope of a line through the steps, drawn towards what is usual."""
        rows = max(self._rows, 1.0)
        usual = 1 / (_PRIOR_BASE_ROWS + rows)
        if not self._seconds:
            return usual
        prior = _PRIOR_STEPS * _PRIOR_VARIANCE
        share = (self._covariance / self._seconds + prior * usual) / (self._variance + prior)
        # All rows together take no longer than the step.
        return min(max(share, 0.0), 1 / rows)

    @property
    def price(self) -> float:
        """Of a row: the chance of a token to come, from which on it brings more than the step does in its time."""
        return self.row_share * max(self._tokens, 1.0)

    @property
    def row_s(self) -> float:
        """What a row adds to a step. 0 while nothing is known."""
        return self.row_share * self._seconds

    @property
    def prompt_token_s(self) -> float:
        """What a token of a prompt adds to a step. 0 while nothing is known."""
        return max(0.0, self._prompt_seconds / self._prompt_tokens) if self._prompt_tokens else 0.0

    def shares(self, *, sequences: int, rows: int, prompt_tokens: int, seconds: float) -> StepShares:
        """Of a step: each row and token takes what it adds, and the sequences divide the rest."""
        row_s, prompt_token_s = self.row_s, self.prompt_token_s
        added_s = rows * row_s + prompt_tokens * prompt_token_s
        # A step that was faster than the line says is all its rows'.
        scale = min(1.0, seconds / added_s) if added_s else 0.0
        rest_s = seconds - scale * added_s
        return StepShares(rest_s / max(1, sequences), scale * prompt_token_s, scale * row_s)
