"""What a draft does while its guess is judged: how far it guesses on, and whether it prepares for other outcomes. Pure.

How far follows from times: as many tokens as it computes until the next commit can be there. Whether preparing pays
does not: it spares the way there and back where it hits, and slows a target whose memory it shares. So rounds with and
without it take turns, a few at a time, and most go the way that was faster lately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider_controller.router.config import PolicyConfig

# Forgetting per round of either way, so that both are known as of the same time: 200 rounds count.
_KEEP = 0.995
# Rounds by which a way is known. With fewer it is tried.
_ENOUGH = 16.0
# The first of a turn began with what was asked for before.
_SETTLING = 2
# Of what a draft takes for a token: half of it is from the last three answers.
_KEEP_TIMES = 0.8


@dataclass(slots=True)
class _Way:
    rounds: float = 0.0
    tokens: float = 0.0
    us: float = 0.0

    @property
    def known(self) -> bool:
        return self.rounds >= _ENOUGH

    @property
    def speed(self) -> float:
        return self.tokens / max(self.us, 1.0)


@dataclass(slots=True)
class Preparing:
    """Rounds with a draft that prepares and with one that does not: of all requests of a tenant that it serves."""

    _without: _Way = field(default_factory=_Way)
    _with: _Way = field(default_factory=_Way)

    def took(self, prepares: bool, *, tokens: float, us: int) -> None:
        """One round, and the tokens to be expected of such."""
        for way in (self._without, self._with):
            way.rounds *= _KEEP
            way.tokens *= _KEEP
            way.us *= _KEEP
        way = self._with if prepares else self._without
        way.rounds += 1
        way.tokens += tokens
        way.us += us

    @property
    def pays(self) -> bool:
        """Whether the next turn should be one with it: the faster way, or the one of which less is known."""
        if self._without.known and self._with.known:
            return self._with.speed > self._without.speed
        return self._with.rounds < self._without.rounds


@dataclass(slots=True)
class Ahead:
    """One request's draft while its guess is judged."""

    config: PolicyConfig
    prepares: bool = False
    preparing: Preparing = field(default_factory=Preparing)
    _rounds: int = 0
    """Of the turn."""
    _token_us: float = 0.0
    _answer_us: float = 0.0
    """Of which it computes; both 0 while unknown."""

    def opened(self, preparing: Preparing) -> None:
        """A draft was opened; of another nothing is known yet."""
        if preparing is not self.preparing:
            self._token_us = self._answer_us = 0.0
        self.preparing = preparing
        self._turn()

    def round(self, *, tokens: float, us: int) -> None:
        """One round in which the draft was at work, and the tokens to be expected of such a round.

        Not those that it brought: they differ more from round to round than what is to be seen here.
        """
        self._rounds += 1
        if self._rounds > _SETTLING:
            self.preparing.took(self.prepares, tokens=tokens, us=us)
        if self._rounds >= _SETTLING + self.config.rounds_per_turn:
            self._turn()

    def answered(self, num_tokens: int, compute_us: int) -> None:
        """What an answer took the draft, without the way and the waiting."""
        if not num_tokens:
            return
        keep = _KEEP_TIMES if self._answer_us else 0.0
        self._answer_us = keep * self._answer_us + (1 - keep) * compute_us
        self._token_us = keep * self._token_us + (1 - keep) * compute_us / num_tokens

    def token_steps(self, step_us: float) -> float:
        """What drafting a token takes, in steps of the target; 0 while unknown."""
        return self._token_us / step_us if step_us else 0.0

    def num_tokens(self, step_us: float, turnaround_us: int) -> int:
        """How many tokens beyond its guess the draft has time for: from its answer until it hears of the next commit.

        That is a step of the target and the way there and back.
        """
        most = self.config.run_ahead_tokens
        if not (step_us and turnaround_us and self._token_us):
            return most
        free_us = step_us + max(turnaround_us - self._answer_us, 0.0)
        return min(most, math.ceil(free_us / self._token_us))

    @property
    def num_alternatives(self) -> int:
        return self.config.num_alternatives if self.prepares else 0

    def _turn(self) -> None:
        prepares = self.config.num_alternatives > 0 and self.preparing.pays
        # Whoever goes on as before has nothing to settle.
        self._rounds = _SETTLING if prepares == self.prepares else 0
        self.prepares = prepares
