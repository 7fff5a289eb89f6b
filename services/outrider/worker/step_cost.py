"""Estimates the time that one more row and one more prompt token add to a step, from measured steps. Pure.

While a step is bound by memory bandwidth a row is almost free; when it is bound by arithmetic, as on a CPU or in a full
batch, it is not. The estimate decides whether a drafted token is worth its row and how a step's time is divided among
its sequences. A router uses it to weigh a cached prefix against a busy worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider import tuning


@dataclass(frozen=True, slots=True)
class StepShares:
    """How one step's time is divided, in seconds. The parts sum to the step."""

    sequence_s: float
    """Each sequence's share of the fixed part of the step."""
    prompt_token_s: float
    row_s: float

    def of(self, *, prompt_tokens: int, rows: int) -> float:
        return self.sequence_s + prompt_tokens * self.prompt_token_s + rows * self.row_s


@dataclass(slots=True)
class StepCost:
    """A regression line through the last steps that only decode and verify. In other steps, the time above it is that
    of their prompt tokens."""

    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _tokens: float = 0.0
    """Means of rows, seconds and committed tokens per step; _weight: the number of steps behind them."""
    _variance: float = 0.0
    """Sum of squared deviations of the rows."""
    _covariance: float = 0.0
    """Sum of products of the deviations of rows and seconds."""
    _prompt_tokens: float = 0.0
    _prompt_seconds: float = 0.0
    """Sums over the last steps with prompts."""
    _last_s: float = 0.0

    def took(self, *, rows: int, seconds: float, tokens: int = 0, prompt_tokens: int = 0) -> None:
        """Records one step, without the time in which its drafts were made: its rows that decode or verify, its prompt
        tokens, and the tokens that it committed."""
        if seconds <= 0 or not (rows or prompt_tokens):
            return
        self._last_s = seconds
        if prompt_tokens:
            decoding_s = self._seconds + self.row_s * (rows - self._rows)
            self._prompt_tokens = tuning.KEEP * self._prompt_tokens + prompt_tokens
            self._prompt_seconds = tuning.KEEP * self._prompt_seconds + seconds - decoding_s
            return
        self._weight = tuning.KEEP * self._weight + 1
        share = 1 / self._weight
        deviation = rows - self._rows
        self._rows += share * deviation
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)
        # Welford: one factor uses the mean before, one the mean after.
        varies = deviation * (rows - self._rows)
        informs = varies * self._weight / (self._variance + tuning.PRIOR_ROWS)
        kept = min(tuning.KEEP_STEP, tuning.KEEP ** min(1.0, informs))
        self._variance = kept * self._variance + varies
        self._covariance = kept * self._covariance + deviation * (seconds - self._seconds)

    @property
    def step_s(self) -> float:
        """Seconds that a step may be expected to take at least: of a mean one without prompts, or of the last one if it
        was shorter. 0 while unknown."""
        return min(self._seconds, self._last_s)

    @property
    def row_share(self) -> float:
        """Time of one more row as a share of a mean step: the slope of the line, shrunk towards the prior."""
        rows = max(self._rows, 1.0)
        usual = 1 / (tuning.PRIOR_ROWS + rows)
        if not self._seconds:
            return usual
        prior = tuning.PRIOR_ROWS
        share = (self._covariance / self._seconds + prior * usual) / (self._variance + prior)
        # All rows together take at most the whole step.
        return min(max(share, 0.0), 1 / rows)

    @property
    def price(self) -> float:
        """The least chance at which a drafted token pays: it must bring more tokens per second than the step does."""
        return self.row_share * max(self._tokens, 1.0)

    @property
    def row_s(self) -> float:
        """Seconds that one more row adds to a step. 0 while unknown."""
        return self.row_share * self._seconds

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token adds to a step. 0 while unknown."""
        return max(0.0, self._prompt_seconds / self._prompt_tokens) if self._prompt_tokens else 0.0

    def shares(self, *, sequences: int, rows: int, prompt_tokens: int, seconds: float) -> StepShares:
        """Divides a step: each row and prompt token gets the time that it adds, and the sequences share the rest
        equally."""
        row_s, prompt_token_s = self.row_s, self.prompt_token_s
        added_s = rows * row_s + prompt_tokens * prompt_token_s
        # A step that was faster than the estimate is divided among its rows and prompt tokens only.
        scale = min(1.0, seconds / added_s) if added_s else 0.0
        rest_s = seconds - scale * added_s
        return StepShares(rest_s / max(1, sequences), scale * prompt_token_s, scale * row_s)
