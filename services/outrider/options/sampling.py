"""A sequence's sampling parameters, checked when they are constructed."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from outrider.errors import InvalidRequest

Q_WIDTH = 64
"""Most tokens of a draft's distribution."""
Q_TOTAL = 1 << 16
"""What its counts sum to."""


class VerificationMode(enum.Enum):
    """The rule by which drafts are verified."""

    GREEDY = "greedy"
    """Accept the target's argmax. Temperature 0."""
    COUPLED = "coupled"
    """Accept argmax(log p + Gumbel noise keyed by seed, position, token): the text does not depend on the draft."""
    RATIO = "ratio"
    """Accept x when u·q(x) < p(x), else sample the residual: highest acceptance, needs q."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token follows from the target's logits. Applied in this order."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens, and those as likely as the last of them. 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their mass reaches this. In (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest. In [0, 1]."""
    seed: int = 0
    """Seed of all noise, 64 bits."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest("temperature", f"{self.temperature} is not a finite number of at least 0")
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"{self.top_k} is negative")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p", f"{self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest("min_p", f"{self.min_p} is not in [0, 1]")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidRequest("seed", f"{self.seed} is not an unsigned 64-bit number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q at one position, exactly as the draft sampled from it: token_ids[i] with probability counts[i] / 65536."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= Q_WIDTH:
            raise InvalidRequest("token_ids", f"{len(self.token_ids)} tokens, must be 1 to {Q_WIDTH}")
        if len(set(self.token_ids)) != len(self.token_ids):
            raise InvalidRequest("token_ids", "a token occurs twice")
        if min(self.token_ids) < 0:
            raise InvalidRequest("token_ids", "negative")
        if len(self.counts) != len(self.token_ids):
            raise InvalidRequest("counts", f"{len(self.counts)} counts for {len(self.token_ids)} tokens")
        if min(self.counts) < 1 or sum(self.counts) != Q_TOTAL:
            raise InvalidRequest("counts", f"must each be at least 1 and sum to {Q_TOTAL}")

    def count_of(self, token_id: int) -> int:
        """0 when the draft could not have drawn it."""
        return self.counts[self.token_ids.index(token_id)] if token_id in self.token_ids else 0
