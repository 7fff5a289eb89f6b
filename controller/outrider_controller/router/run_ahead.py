"""What a draft does while its guess is verified: how far it guesses on, whether it prepares for other outcomes. Pure.

How far follows from times: as many tokens as it computes until the next commit can be there. Whether preparing pays
does not: where it hits it spares the way there and back, and has had time for longer guesses; but it slows a target
whose memory it shares. So rounds with and without it take turns, a few at a time, and most go the way that was faster.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from outrider_controller.router.config import PolicyConfig

# Forgetting per round of either way, so that both are known as of the same time: 500 rounds count.
_KEEP = 0.998
# Rounds by which a way is known. With fewer it is tried.
_ENOUGH = 16.0
# What a round brings differs by more than half from one to the next, so a way that is little known counts as though so
# many rounds of the average had gone it too.
_AVERAGE_ROUNDS = 50.0
# Preparing is given up where it is so much slower: less is chance, and where nothing is shared it does not slow anyone.
_CLEARLY = 1.02
# The first rounds of a turn began with what was asked for before.
_SETTLING = 2
# What a draft takes is the middle one of so many answers: the first took it the prompt too, and one after a rest all
# that was committed meanwhile.
_NUM_ANSWERS = 9


@dataclass(slots=True)
class _Arm:
    rounds: float = 0.0
    tokens: float = 0.0
    us: float = 0.0

    def fade(self, keep: float) -> None:
        self.rounds *= keep
        self.tokens *= keep
        self.us *= keep


@dataclass(slots=True)
class LookaheadGain:
    """Rounds with a draft that prepares and with one that does not: of all requests of a tenant that it serves."""

    _without: _Arm = field(default_factory=_Arm)
    _with: _Arm = field(default_factory=_Arm)

    def took(self, prepares: bool, *, rounds: int, tokens: int, us: int) -> None:
        """Some rounds, and the tokens that they brought."""
        keep = _KEEP**rounds
        self._without.fade(keep)
        self._with.fade(keep)
        way = self._with if prepares else self._without
        way.rounds += rounds
        way.tokens += tokens
        way.us += us

    def pays(self) -> bool:
        """Whether the next turn is one with it."""
        if self._with.rounds < _ENOUGH:
            return True
        if self._without.rounds < _ENOUGH:
            return False
        return _CLEARLY * self._speed(self._with) >= self._speed(self._without)

    def _speed(self, way: _Arm) -> float:
        """Tokens in a µs."""
        share = _AVERAGE_ROUNDS / (self._with.rounds + self._without.rounds)
        tokens = way.tokens + share * (self._with.tokens + self._without.tokens)
        us = way.us + share * (self._with.us + self._without.us)
        return tokens / max(us, 1.0)


@dataclass(slots=True)
class RunAhead:
    """One request's draft while its guess is verified."""

    config: PolicyConfig
    prepares: bool = False
    run_ahead_tokens: int = field(init=False)
    """How far beyond its guess it may go. Like `prepares` it changes from turn to turn only."""
    lookahead: LookaheadGain = field(default_factory=LookaheadGain)
    _rounds: int = 0
    """Of the turn; then those of them that count, their tokens and their time."""
    _counted: int = 0
    _tokens: int = 0
    _us: int = 0
    _answers: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_NUM_ANSWERS))
    """What the last ones took the draft, in µs, and their tokens."""

    def __post_init__(self) -> None:
        self.run_ahead_tokens = self.config.run_ahead_tokens

    def opened(self, lookahead: LookaheadGain) -> None:
        """A draft was opened; of another nothing is known yet."""
        if lookahead is not self.lookahead:
            self.lookahead = lookahead
            self._answers.clear()
            self.run_ahead_tokens = self.config.run_ahead_tokens
        self._turn()

    def round(self, *, tokens: int, us: int, step_us: float, turnaround_us: int, rounds: int = 1) -> None:
        """Some rounds in which the draft was at work, and the tokens that they brought.

        `step_us` and `turnaround_us`: of late.
        """
        settling = self._rounds < _SETTLING
        self._rounds += rounds
        if settling:
            return
        self._counted += rounds
        self._tokens += tokens
        self._us += us
        if self._counted >= self.config.rounds_per_turn:
            self.lookahead.took(self.prepares, rounds=self._counted, tokens=self._tokens, us=self._us)
            self._time(step_us, turnaround_us)
            self._turn()

    def answered(self, num_tokens: int, compute_us: int) -> None:
        """What an answer took the draft, without the way and the waiting."""
        if num_tokens:
            self._answers.append((compute_us, num_tokens))

    @property
    def num_alternatives(self) -> int:
        return self.config.num_alternatives if self.prepares else 0

    def _time(self, step_us: float, turnaround_us: int) -> None:
        """How far beyond its guess the draft has time for: from its answer until it hears of the next commit.

        That is a step of the target and the way there and back.
        """
        if not (self._answers and step_us and turnaround_us):
            return
        token_us = median(us / num_tokens for us, num_tokens in self._answers)
        free_us = step_us + max(turnaround_us - median(us for us, _ in self._answers), 0.0)
        self.run_ahead_tokens = min(self.config.run_ahead_tokens, math.ceil(free_us / max(token_us, 1.0)))

    def _turn(self) -> None:
        prepares = self.config.num_alternatives > 0 and self.lookahead.pays()
        # Whoever goes on as before has nothing to settle.
        self._rounds = _SETTLING if prepares == self.prepares else 0
        self._counted = self._tokens = self._us = 0
        self.prepares = prepares
