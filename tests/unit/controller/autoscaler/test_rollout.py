"""Rollouts in virtual time: requests drawn from a real acceptance process, until the test has its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
from outrider.draft.shadow import Shadow, ShadowPairs
from outrider.drafting.tree import DraftTree
from outrider_controller.autoscaler.evidence import Evidence
from outrider_controller.autoscaler.rollout import (
    DEFAULT_SHADOW_SHARE,
    DEFAULT_SHARE,
    GIVE_UP_TOKENS,
    MIN_REPORTS,
    SHADOW_FIRST_S,
    Rollout,
    Shadowed,
    Stage,
    Trial,
)

from tests.acceptance_process import read

# Of a round: drafted tokens, the price of each row, and the waits that some rounds have.
CHAIN, PRICE, WAITING, WAIT = 4, 0.05, 0.1, 0.3
PER_REPORT = 40
"""Requests that end in a second."""
BITS = [np.array(row, dtype=bool) for row in read() if len(row) >= 8]
Costs = np.ndarray[Any, np.dtype[np.float64]]


def acceptance(rows: list[Any]) -> float:
    """Accepted / verified of rounds of the rows: a position after a rejection is not verified."""
    rounds = [round_ for bits in rows for round_ in rounds_of(bits)]
    verified = sum(min(accepted + 1, CHAIN) for accepted in rounds)
    return sum(rounds) / verified


def rounds_of(bits: Any) -> list[int]:
    """Accepted tokens of each round, the whole answer long."""
    found, at = [], 0
    while at < len(bits):
        chain = bits[at : at + CHAIN]
        accepted = len(chain) if chain.all() else int(chain.argmin())
        found.append(accepted)
        at += accepted + 1
    return found


def spoiled(share: float, rng: np.random.Generator) -> list[Any]:
    """The process of a draft that errs in this share of the tokens that it foretold."""
    return [bits & (rng.random(len(bits)) >= share) for bits in BITS]


def priced(share: float, rng: np.random.Generator) -> Costs:
    """Tokens and cost of many requests, to be drawn from."""
    found = []
    for bits in [row for _ in range(4) for row in spoiled(share, rng)]:
        rounds = rounds_of(bits)
        waits = WAIT * rng.binomial(len(rounds), WAITING)
        found.append((sum(rounds) + len(rounds), len(rounds) * (1 + PRICE * CHAIN) + waits))
    return np.array(found, dtype=np.float64)


def drawn(costs: Costs, count: int, rng: np.random.Generator) -> Evidence:
    tokens, cost = costs[rng.integers(len(costs), size=count)].T
    return Evidence(requests=count, request_tokens=tokens.sum(), request_cost=cost.sum())


RIGHT, WRONG = 1, 2


def followed(candidate: float, incumbent: float, rng: np.random.Generator) -> list[Shadow]:
    """Shadows of a candidate that have followed whole answers, of which the incumbent drafted each round."""
    found = []
    for _ in range(4):
        for mine, others in zip(spoiled(candidate, rng), spoiled(incumbent, rng), strict=True):
            shadow, at = Shadow(), 0
            for accepted in rounds_of(others):
                if shadow.proposal is None:
                    shadow.propose(DraftTree(at, tuple(RIGHT if bit else WRONG for bit in mine[at : at + CHAIN])))
                tokens = min(accepted + 1, len(others) - at)
                shadow.commit(at, [RIGHT] * tokens, (CHAIN, accepted))
                at += tokens
            shadow.end()
            found.append(shadow)
    return found


def watched(before: ShadowPairs, shadows: list[Shadow], count: int, rng: np.random.Generator) -> ShadowPairs:
    for each in rng.integers(len(shadows), size=count):
        before = before.with_ended(shadows[each])
    return before


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: Stage
    tokens: float
    share: float
    """The candidate's part of all tokens until then."""


def rolled_out(candidate: Costs, incumbent: Costs, shadows: list[Shadow], seed: int) -> Outcome:
    """Without shadows, none follows."""
    rng, trial, pairs = np.random.default_rng(seed), Trial(), ShadowPairs()
    rollout, seconds = Rollout("new", "", DEFAULT_SHARE, Stage.RUNNING, DEFAULT_SHADOW_SHARE if shadows else 0.0), 0
    while (verdict := trial.verdict()) is None:
        seconds += 1
        count = 0 if trial.holds_back(rollout, seconds) else rng.binomial(PER_REPORT, DEFAULT_SHARE)
        trial.add(drawn(candidate, count, rng), drawn(incumbent, PER_REPORT - count, rng))
        if shadows:
            pairs = watched(pairs, shadows, rng.binomial(PER_REPORT - count, DEFAULT_SHADOW_SHARE), rng)
            trial.shadow = Shadowed(**asdict(pairs))
    tokens = trial.candidate.tokens
    return Outcome(verdict[0], tokens, tokens / (tokens + trial.incumbent.tokens))


# Errors that lower the acceptance by 0.05.
SPOILED = 0.105


def test_the_spoiled_draft_is_worse_by_a_twentieth() -> None:
    rng = np.random.default_rng(1)
    assert acceptance(BITS) - acceptance(spoiled(SPOILED, rng)) == pytest.approx(0.05, abs=0.005)


def rollouts(candidate: float, incumbent: float, count: int, *, shadow: bool = True) -> list[Outcome]:
    rng = np.random.default_rng(7)
    both = priced(candidate, rng), priced(incumbent, rng)
    shadows = followed(candidate, incumbent, rng) if shadow else []
    return [rolled_out(*both, shadows, seed) for seed in range(count)]


def shadowed(candidate: float, incumbent: float) -> Shadowed:
    rng = np.random.default_rng(5)
    shadows = followed(candidate, incumbent, rng)
    return Shadowed(**asdict(watched(ShadowPairs(), shadows, 2000, rng)))


def test_on_the_same_text_a_draft_is_found_worse_by_what_it_costs_in_rounds() -> None:
    rng = np.random.default_rng(2)
    worse, draft = (
        sum(map(len, rows)) / sum(len(rounds_of(bits)) for bits in rows) for rows in (spoiled(SPOILED, rng), BITS)
    )
    found = shadowed(SPOILED, 0.0).compare()
    assert found is not None and found.saving == pytest.approx(1 / draft - 1 / worse, abs=0.005)
    assert found.lower < found.saving < found.upper < -0.02


def test_as_a_shadow_a_draft_that_errs_as_often_elsewhere_is_no_worse_and_a_better_one_is_never_promoted() -> None:
    equal, better = shadowed(SPOILED, SPOILED), shadowed(0.0, SPOILED)
    found, trial = equal.compare(), Trial(shadow=better)
    assert found is not None and abs(found.saving) < 0.005 and Trial(shadow=equal).verdict() is None
    best = better.compare()
    assert best is not None and best.lower > 0 and trial.verdict() is None


def test_a_shadow_says_nothing_before_it_has_followed_enough_sequences() -> None:
    rng = np.random.default_rng(1)
    few = Shadowed(**asdict(watched(ShadowPairs(), followed(0.9, 0.0, rng), MIN_REPORTS - 1, rng)))
    assert few.compare() is None and Trial(shadow=few).verdict() is None


@pytest.mark.parametrize("wrong", [{"rounds": 0.0}, {"gained": -500.0}, {"rounds": float("nan")}])
def test_sums_that_cannot_be_say_nothing(wrong: dict[str, float]) -> None:
    sums = Shadowed(sequences=30.0, rounds=100.0, accepted_in_use=50.0, rounds_squared=1e3, gained_squared=1e3)
    assert replace(sums, **wrong).compare() is None


def test_what_delays_both_drafts_in_the_same_second_hardly_widens_the_interval() -> None:
    rng, trial = np.random.default_rng(3), Trial()
    costs = priced(0.0, rng)
    for _ in range(40):
        both, delay = (drawn(costs, 10, rng), drawn(costs, 90, rng)), rng.exponential(2.0)
        for one in both:
            one.request_cost += delay * one.request_tokens
        trial.add(*both)
    assert trial.variance < 0.2 * (trial.candidate.variance + trial.incumbent.variance)


def test_the_share_waits_for_shadows_and_not_for_ever() -> None:
    trial, rollout = Trial(), Rollout("new", "", 0.03, Stage.RUNNING, shadow_share=0.1)
    assert trial.holds_back(rollout, 1.0) and not trial.holds_back(rollout, SHADOW_FIRST_S)
    assert not trial.holds_back(replace(rollout, shadow_share=0.0), 1.0)
    assert not Trial(shadow=Shadowed(sequences=MIN_REPORTS)).holds_back(rollout, 1.0)


def test_equals_are_hardly_ever_promoted_or_undone() -> None:
    found = rollouts(SPOILED, SPOILED, 20)
    assert sum(one.stage is not Stage.GIVEN_UP for one in found) <= 1
    assert all(one.tokens >= GIVE_UP_TOKENS for one in found if one.stage is Stage.GIVEN_UP)


def test_a_better_draft_is_promoted_and_a_worse_one_undone_in_time() -> None:
    better, worse = rollouts(0.0, SPOILED, 20), rollouts(SPOILED, 0.0, 20)
    assert {one.stage for one in better} == {Stage.PROMOTED} and max(one.tokens for one in better) <= 100_000
    assert {one.stage for one in worse} == {Stage.UNDONE} and max(one.tokens for one in worse) <= 20_000


@pytest.mark.slow
def test_two_hundred_rollouts_of_each_kind() -> None:
    equal, better = rollouts(SPOILED, SPOILED, 200), rollouts(0.0, SPOILED, 200)
    worse, alone = rollouts(SPOILED, 0.0, 200), rollouts(SPOILED, 0.0, 200, shadow=False)
    wrong = sum(one.stage is not Stage.GIVEN_UP for one in equal)
    promoted, undone, without = ([one.tokens for one in outcomes] for outcomes in (better, worse, alone))
    most = max(one.share for one in worse)
    print(f"{wrong} of 200 equals had a verdict; a worse one had at most {most:.1%} of all tokens")
    print(f"promoted after {np.median(promoted):,.0f}, at most {max(promoted):,.0f} tokens")
    never = sum(not tokens for tokens in undone)
    print(f"undone after {np.median(undone):,.0f}, at most {max(undone):,.0f} tokens; {never} of 200 before the first")
    print(f"undone without shadows after {np.median(without):,.0f}, at most {max(without):,.0f} tokens")
    assert wrong <= 10 and most <= 0.05
    assert {one.stage for one in better} == {Stage.PROMOTED} and max(promoted) <= 100_000
    assert {one.stage for one in worse} == {Stage.UNDONE} and max(undone) <= 20_000
    assert {one.stage for one in alone} == {Stage.UNDONE} and np.median(without) <= 20_000
