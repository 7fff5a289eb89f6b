"""Rollouts in virtual time: requests drawn from a real acceptance process, until the test has its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from outrider_controller.autoscaler.evidence import Evidence
from outrider_controller.autoscaler.rollout import DEFAULT_SHARE, GIVE_UP_TOKENS, Stage, Trial

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


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: Stage
    tokens: float
    share: float
    """The candidate's part of all tokens until then."""


def rolled_out(candidate: Costs, incumbent: Costs, seed: int) -> Outcome:
    rng, trial = np.random.default_rng(seed), Trial()
    while (verdict := trial.verdict()) is None:
        count = rng.binomial(PER_REPORT, DEFAULT_SHARE)
        trial.add(drawn(candidate, count, rng), drawn(incumbent, PER_REPORT - count, rng))
    tokens = trial.candidate.tokens
    return Outcome(verdict[0], tokens, tokens / (tokens + trial.incumbent.tokens))


# Errors that lower the acceptance by 0.05.
SPOILED = 0.105


def test_the_spoiled_draft_is_worse_by_a_twentieth() -> None:
    rng = np.random.default_rng(1)
    assert acceptance(BITS) - acceptance(spoiled(SPOILED, rng)) == pytest.approx(0.05, abs=0.005)


def rollouts(candidate: float, incumbent: float, count: int) -> list[Outcome]:
    rng = np.random.default_rng(7)
    both = priced(candidate, rng), priced(incumbent, rng)
    return [rolled_out(*both, seed) for seed in range(count)]


def test_what_delays_both_drafts_in_the_same_second_hardly_widens_the_interval() -> None:
    rng, trial = np.random.default_rng(3), Trial()
    costs = priced(0.0, rng)
    for _ in range(40):
        both, delay = (drawn(costs, 10, rng), drawn(costs, 90, rng)), rng.exponential(2.0)
        for one in both:
            one.request_cost += delay * one.request_tokens
        trial.add(*both)
    assert trial.variance < 0.2 * (trial.candidate.variance + trial.incumbent.variance)


def test_equals_are_hardly_ever_promoted_or_undone() -> None:
    found = rollouts(SPOILED, SPOILED, 20)
    assert sum(one.stage is not Stage.GIVEN_UP for one in found) <= 1
    assert all(one.tokens >= GIVE_UP_TOKENS for one in found if one.stage is Stage.GIVEN_UP)


def test_a_better_draft_is_promoted_and_a_worse_one_undone_in_time() -> None:
    better, worse = rollouts(0.0, SPOILED, 20), rollouts(SPOILED, 0.0, 20)
    assert {one.stage for one in better} == {Stage.PROMOTED} and max(one.tokens for one in better) <= 100_000
    assert {one.stage for one in worse} == {Stage.UNDONE} and max(one.tokens for one in worse) <= 60_000


@pytest.mark.slow
def test_two_hundred_rollouts_of_each_kind() -> None:
    equal, better, worse = (rollouts(*each, 200) for each in ((SPOILED, SPOILED), (0.0, SPOILED), (SPOILED, 0.0)))
    wrong = sum(one.stage is not Stage.GIVEN_UP for one in equal)
    promoted, undone = ([one.tokens for one in outcomes] for outcomes in (better, worse))
    most = max(one.share for one in worse)
    print(f"{wrong} of 200 equals had a verdict; a worse one had at most {most:.1%} of all tokens")
    print(f"promoted after {np.median(promoted):,.0f}, at most {max(promoted):,.0f} tokens")
    print(f"undone after {np.median(undone):,.0f}, at most {max(undone):,.0f} tokens")
    assert wrong <= 10 and most <= 0.05
    assert {one.stage for one in better} == {Stage.PROMOTED} and max(promoted) <= 100_000
    assert {one.stage for one in worse} == {Stage.UNDONE} and np.median(undone) <= 20_000
