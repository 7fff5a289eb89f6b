"""Whether a draft pays: requests one after the other, with the plan each second, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from outrider.protocol.rounds import Round as Commit
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Mode, TargetState
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.router.speculation.gain import DraftRecord, add_round

PLAIN_US = 30_000
KEY = EvidenceKey("t", "m", "d")
FLEET = {"m": TargetState(frozenset({"d"}))}
Round = Callable[[random.Random], tuple[int, int]]
"""Tokens and microseconds of one round with a draft."""


@dataclass
class Played:
    tokens: int = 0
    us: int = 0
    drafted_rounds: int = 0

    @property
    def ratio(self) -> float:
        """Speed over that of plain decoding."""
        return self.tokens * PLAIN_US / self.us


@dataclass
class Tenant:
    """What outlives its requests."""

    record: DraftRecord = field(default_factory=DraftRecord)
    planner: Planner = field(default_factory=Planner)
    us: int = 0
    requests: int = 0
    _planned_s: float = -1.0

    @property
    def mode(self) -> Mode:
        decision = self.planner.plan.decision(Cell("t", "m"))
        return Mode.ON if decision is None else decision.mode

    def passed(self, us: int) -> None:
        self.us += us
        if self.us / 1e6 - self._planned_s >= 1:
            self._planned_s = self.us / 1e6
            self.planner.learn({KEY: self.record.take()})
            self.planner.step({}, FLEET, self._planned_s)

    def drafts(self) -> bool:
        """Whether the plan gives the next request a draft."""
        self.requests += 1
        decision = self.planner.plan.decision(Cell("t", "m"))
        return decision is None or decision.draft_for(f"request {self.requests}") is not None


def play(drafted: Round, *, requests: int = 12, length: int = 64, tenant: Tenant | None = None) -> Played:
    """Requests one after the other. A draft speaks from its second round on."""
    rng, played, tenant = random.Random(7), Played(), tenant or Tenant()
    for _ in range(requests):
        drafts, tokens, rounds = tenant.drafts(), 0, 0
        while tokens < length:
            count, us = drafted(rng) if drafts and rounds else (1, PLAIN_US)
            if drafts and rounds:
                tenant.record.evidence.add_rounds(rounds=1, tokens=count, saved=count - us / PLAIN_US)
                played.drafted_rounds += 1
            rounds += 1
            tokens += count
            played.us += us
            tenant.passed(us)
        played.tokens += tokens
    return played


def accepting(chance: float, us: int, most: int = 5) -> Round:
    def drafted(rng: random.Random) -> tuple[int, int]:
        count = 1
        while count <= most and rng.random() < chance:
            count += 1
        return count, us

    return drafted


@pytest.mark.parametrize("requests", [8, 80])
def test_a_draft_whose_machine_was_busy_for_a_while_is_soon_in_use_again(requests: int) -> None:
    def busy(rng: random.Random) -> tuple[int, int]:
        return good(rng)[0], rng.choice([45_000, 75_000, 150_000])

    good = accepting(0.6, 42_000)
    tenant = Tenant()
    before = play(good, requests=40, tenant=tenant).ratio
    play(busy, requests=requests, tenant=tenant)
    play(good, requests=requests, tenant=tenant)
    assert play(good, requests=40, tenant=tenant).ratio > 0.97 * before


def test_unlucky_stretches_do_not_put_a_draft_to_rest_that_pays_a_fifth() -> None:
    # 1.9 tokens a round of 1.5 plain ones: more than half of its rounds save nothing.
    paying = accepting(0.47, int(1.5 * PLAIN_US))
    always = Played()
    rng = random.Random(7)
    for _ in range(2000):
        tokens, us = paying(rng)
        always.tokens, always.us = always.tokens + tokens, always.us + us
    assert always.ratio > 1.15
    assert play(paying, requests=40).ratio > 0.93 * always.ratio


def test_a_text_that_it_cannot_guess_does_not_cost_the_next_one_its_draft() -> None:
    tenant = Tenant()
    play(accepting(0.7, 42_000), tenant=tenant)
    for _ in range(20):
        play(accepting(0.1, 45_000), requests=1, length=128, tenant=tenant)
        assert tenant.mode is Mode.ON
        assert play(accepting(0.7, 42_000), requests=1, length=128, tenant=tenant).ratio > 1.3


def test_a_draft_gets_no_credit_for_what_the_target_drafts_itself() -> None:
    def evidence(own: bool) -> Evidence:
        seen = Evidence()
        commit = sequence.Commit(token_ids=[1, 2, 3], num_drafted=3, num_verified=3, num_accepted=2)
        commit.sources.add(source="model", num_drafted=1, num_verified=1, num_accepted=0 if own else 1)
        commit.sources.add(source="ngram", own=own, num_drafted=2, num_verified=2, num_accepted=2 if own else 1)
        for _ in range(20):
            add_round(seen, Commit.from_commit(commit, PLAIN_US), 0.0)
        seen.took(20 * 2)
        return seen

    of_all, of_the_draft = evidence(own=False), evidence(own=True)
    # Three tokens in the time of two steps: without the draft a step gives those that are not the draft's.
    assert of_all.saved == pytest.approx(20 * 1.0) and of_the_draft.saved == pytest.approx(20 * -3.0)
    assert (of_the_draft.verified, of_the_draft.accepted, of_the_draft.late) == (20, 0, 0)


def test_what_a_draft_has_accepted_is_part_of_what_was_verified_of_it_whatever_the_target_drafts_beside_it() -> None:
    # At each of two places: a token of the worker, one that was looked up, and three alternatives of a head.
    commit = sequence.Commit(token_ids=[1, 2, 3], num_drafted=2, num_verified=2, num_accepted=2)
    commit.sources.add(source="model", num_drafted=2, num_verified=2, num_accepted=1)
    commit.sources.add(source="ngram", own=True, num_drafted=2, num_verified=2, num_accepted=1)
    commit.sources.add(source="mtp", own=True, num_drafted=6, num_verified=6, num_accepted=0)
    seen = Evidence()
    add_round(seen, Commit.from_commit(commit, PLAIN_US), 0.0)
    assert (seen.verified, seen.accepted) == (2, 1)


def test_a_draft_is_charged_for_its_own_rows() -> None:
    commit = sequence.Commit(token_ids=[1, 2, 3], num_drafted=5, num_verified=3, num_accepted=2)
    commit.sources.add(source="model", num_drafted=3, num_verified=2, num_accepted=1)
    commit.sources.add(source="ngram", own=True, num_drafted=2, num_verified=1, num_accepted=1)
    seen = Evidence()
    add_round(seen, Commit.from_commit(commit, PLAIN_US), 0.4)
    seen.took(1)
    # One token, which would have taken a plain round, for three rows.
    assert seen.saved == pytest.approx(1 - 3 * 0.4)


def test_a_round_with_the_targets_own_drafts_alone_is_one_without_the_draft() -> None:
    commit = sequence.Commit(token_ids=[1, 2], num_drafted=1, num_verified=1, num_accepted=1)
    commit.sources.add(source="ngram", own=True, num_drafted=1, num_verified=1, num_accepted=1)
    seen = Evidence()
    add_round(seen, Commit.from_commit(commit, PLAIN_US), 0.4)
    seen.took(1)
    assert (seen.rounds, seen.late, seen.saved, seen.accepted) == (1, 1, 0, 0)
