"""The plan second by second, in virtual time: near the crossing it stays where it is, and a shift it follows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from outrider_controller.autoscaler.belief import Beliefs
from outrider_controller.autoscaler.evidence import Cell, Evidence, Pairing
from outrider_controller.autoscaler.plan import Mode, Plan, TargetState, plan

PAIRING = Pairing("acme", "target", "draft@1")
FLEET = {"target": TargetState(frozenset({"draft@1"}))}
TOKENS = 2.2


@dataclass
class Ran:
    """What came of so many seconds."""

    changes: int = 0
    goodput: float = 0.0
    """Tokens, in those of plain decoding."""
    always_on: float = 0.0
    seconds: int = 0

    @property
    def best(self) -> float:
        return max(self.always_on, float(self.seconds))


def run(saving: Callable[[float], float], seconds: int, *, streams: int = 8, seed: int = 1) -> tuple[Ran, list[Mode]]:
    """`saving`: of a round at a second. Each stream makes 30 rounds a second; requests last two seconds."""
    chance, beliefs, planned, ran, modes = random.Random(seed), Beliefs(), Plan(), Ran(), []
    beliefs.expect([PAIRING])
    for second in range(seconds):
        before = planned
        planned = plan(beliefs, {}, FLEET, planned, float(second))
        decision = planned.decision(Cell("acme", "target"))
        assert decision is not None
        last = before.decision(Cell("acme", "target"))
        ran.changes += last is not None and last.mode is not decision.mode
        modes.append(decision.mode)
        saved, seen = saving(second), Evidence()
        speed = TOKENS / (TOKENS - saved)
        for stream in range(streams):
            drafts = decision.draft_for(f"{stream} {second // 2}") is not None
            ran.goodput += (speed if drafts else 1.0) / streams
            for _ in range(10 if drafts else 0):
                seen.add_rounds(rounds=3, tokens=6, saved=chance.gauss(3 * saved, 1.2 * 3**0.5))
        ran.always_on += speed
        ran.seconds += 1
        beliefs.learn({PAIRING: seen})
    return ran, modes


@pytest.mark.parametrize("period_s", [20, 60, 150, 600])
@pytest.mark.parametrize("streams", [1, 8, 32])
def test_load_that_swings_about_the_crossing_changes_the_mode_twice_at_most(period_s: int, streams: int) -> None:
    def saving(second: float) -> float:
        return TOKENS * 0.1 * math.sin(2 * math.pi * second / period_s)

    for seed in range(2):
        ran, _ = run(saving, 600, streams=streams, seed=seed)
        assert ran.changes <= 2
        assert ran.goodput >= 0.99 * ran.best


def test_a_shift_of_the_text_is_followed_both_ways() -> None:
    ran, modes = run(lambda second: -0.8 if 100 <= second < 200 else 0.8, 400)
    assert ran.changes == 2
    assert modes[99] is Mode.ON
    assert modes[115] is Mode.TRY
    # Only one request in forty tries.
    assert modes[260] is Mode.ON
    assert ran.goodput > ran.best


@pytest.mark.parametrize("saving", [-1.0, -0.3, -0.1, 0.1, 0.6])
def test_a_tenant_is_never_far_from_the_better_of_always_and_never(saving: float) -> None:
    ran, _ = run(lambda second: saving, 300)
    assert ran.goodput >= 0.985 * ran.best


def test_who_was_away_comes_back_in_its_mode() -> None:
    beliefs, planned = Beliefs(), Plan()
    for second in range(30):
        beliefs.learn({PAIRING: Evidence(100, 120, -60.0, 160.0)})
        planned = plan(beliefs, {}, FLEET, planned, float(second))
    for second in range(30, 3600, 60):
        beliefs.learn({Pairing("other", "target", "draft@1"): Evidence(1000, 3000, 900.0, 1810.0)})
        planned = plan(beliefs, {}, FLEET, planned, float(second))
    decision = planned.decision(Cell("acme", "target"))
    assert decision is not None
    assert decision.mode is Mode.TRY
