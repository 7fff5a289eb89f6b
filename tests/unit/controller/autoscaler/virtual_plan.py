"""One tenant's plan second by second, in virtual time: evidence of some streams goes in, modes come out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider_controller.autoscaler.estimator import SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Mode, Plan, TargetState, plan

KEY = EvidenceKey("acme", "target", "draft@1")
FLEET = {"target": TargetState(frozenset({"draft@1"}))}
TOKENS = 2.2
"""Tokens per round."""

Saving = Callable[[float], float]
"""Saving of a round at a given second, in plain rounds."""


@dataclass(slots=True)
class Planned:
    """The result of a run."""

    modes: list[Mode] = field(default_factory=list)
    """Mode at each second."""
    goodput: float = 0.0
    """Tokens relative to plain decoding."""
    always_on: float = 0.0

    @property
    def changes(self) -> int:
        return sum(mode is not before for before, mode in zip(self.modes, self.modes[1:], strict=False))

    @property
    def of_best(self) -> float:
        """Goodput over that of the better of always and never."""
        return self.goodput / max(self.always_on, float(len(self.modes)))


def swinging(period_s: float, share: float = 0.1) -> Saving:
    """Around the crossing: a round with drafts is up to `share` faster than a plain one, then slower."""
    return lambda second: TOKENS * share * math.sin(2 * math.pi * second / period_s)


def planned(saving: Saving, seconds: int, *, streams: int = 8, seed: int = 1) -> Planned:
    """Each stream makes 30 rounds a second; requests last two seconds."""
    chance, estimator, last, ran = random.Random(seed), SavingEstimator(), Plan(), Planned()
    estimator.expect([KEY])
    for second in range(seconds):
        last = plan(estimator, {}, FLEET, last, float(second))
        decision = last.decision(Cell("acme", "target"))
        assert decision is not None
        ran.modes.append(decision.mode)
        saved, seen = saving(second), Evidence()
        speed = TOKENS / (TOKENS - saved)
        for stream in range(streams):
            drafts = decision.draft_for(f"{stream} {second // 2}") is not None
            ran.goodput += (speed if drafts else 1.0) / streams
            for _ in range(10 if drafts else 0):
                seen.add_rounds(rounds=3, tokens=6, saved=chance.gauss(3 * saved, 1.2 * 3**0.5))
        ran.always_on += speed
        estimator.learn({KEY: seen})
    return ran
