"""Whether a draft pays: requests one after the other, with the plan each second, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from outrider.protocol.rounds import Round as Commit
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.tuning import USUAL_TOKENS
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Mode, TargetState
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.router.speculation.gain import DraftRecord, RoundSums, SpeculationGain

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

    def begin(self) -> SpeculationGain | None:
        """None for a request that the plan gives no draft."""
        self.requests += 1
        decision, gain = self.planner.plan.decision(Cell("t", "m")), SpeculationGain()
        if decision is not None and decision.draft_for(f"request {self.requests}") is None:
            return None
        gain.begin(self.record, 0.5 if decision is None else max(decision.saving, 0.0))
        return gain


def play(drafted: Round, *, requests: int = 12, length: int = 64, tenant: Tenant | None = None) -> Played:
    """Requests one after the other. A draft speaks from its second round on after it was opened or tried again."""
    rng, played, tenant = random.Random(7), Played(), tenant or Tenant()
    for _ in range(requests):
        gain = tenant.begin()
        tokens, rounds_awake = 0, 0
        while tokens < length:
            draft_active = gain is not None and not gain.paused and rounds_awake > 0
            count, us = drafted(rng) if draft_active else (1, PLAIN_US)
            rounds_awake = 0 if gain is None or gain.paused else rounds_awake + 1
            if gain is not None:
                gain.round(one_round(count, int(draft_active), us, PLAIN_US), draft_active=draft_active)
            tokens += count
            played.us += us
            played.drafted_rounds += draft_active
            tenant.passed(us)
        played.tokens += tokens
    return played


def one_round(tokens: int, in_time: int, us: int, step_us: int, verified: int = 0) -> RoundSums:
    return RoundSums(1, tokens, in_time, verified, us=us, step_us=step_us, draft_verified=verified)


def accepting(chance: float, us: int, most: int = 5) -> Round:
    def drafted(rng: random.Random) -> tuple[int, int]:
        count = 1
        while count <= most and rng.random() < chance:
            count += 1
        return count, us

    return drafted


def test_a_draft_that_is_always_wrong_costs_less_than_a_twentieth_and_soon_next_to_nothing() -> None:
    wrong = accepting(0.0, 45_000)
    tenant = Tenant()
    assert play(wrong, tenant=tenant).ratio > 0.95
    play(wrong, requests=60, tenant=tenant)
    assert tenant.mode is Mode.TRY
    assert play(wrong, requests=200, tenant=tenant).ratio > 0.99


def test_a_draft_that_pays_is_hardly_ever_paused() -> None:
    good = accepting(0.6, 42_000)
    always = Played()
    rng = random.Random(7)
    for _ in range(400):
        tokens, us = good(rng)
        always.tokens, always.us = always.tokens + tokens, always.us + us
    # In every request one round goes by before it speaks.
    assert play(good, requests=40).ratio > 0.93 * always.ratio


@pytest.mark.parametrize("requests", [8, 80])
def test_a_draft_whose_machine_was_busy_for_a_while_is_soon_in_use_again(requests: int) -> None:
    def busy(rng: random.Random) -> tuple[int, int]:
        return good(rng)[0], rng.choice([45_000, 75_000, 150_000])

    good = accepting(0.6, 42_000)
    tenant = Tenant()
    before = play(good, requests=40, tenant=tenant).ratio
    assert play(busy, requests=requests, tenant=tenant).ratio > 0.95
    play(good, tenant=tenant)
    assert play(good, requests=40, tenant=tenant).ratio > 0.97 * before


def test_a_draft_that_hardly_pays_is_never_much_of_a_loss() -> None:
    for us in (54_000, 58_000, 63_000, 70_000):
        assert play(accepting(0.5, us), requests=40).ratio > 0.97


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
        assert play(accepting(0.1, 45_000), requests=1, length=128, tenant=tenant).ratio > 0.8
        assert tenant.mode is Mode.ON
        assert play(accepting(0.7, 42_000), requests=1, length=128, tenant=tenant).ratio > 1.3


def test_a_draft_that_becomes_good_is_found_out() -> None:
    tenant = Tenant()
    play(accepting(0.0, 45_000), requests=100, tenant=tenant)
    assert tenant.mode is Mode.TRY
    play(accepting(0.7, 42_000), requests=200, tenant=tenant)
    assert tenant.mode is Mode.ON
    assert play(accepting(0.7, 42_000), requests=30, tenant=tenant).ratio > 1.5


def test_what_a_plain_round_takes_is_measured_with_the_draft_paused_before_a_small_saving_counts() -> None:
    gain = begun(DraftRecord())
    # Beside the draft a step takes a third longer than it does alone, so this draft seems to lose nothing.
    while not gain.paused:
        gain.round(one_round(1, 1, 40_000, 40_000), draft_active=True)
    assert gain.record.evidence.rounds < 10
    while gain.paused:
        gain.round(one_round(1, 0, PLAIN_US, PLAIN_US), draft_active=False)
    assert gain.record.plain_share == pytest.approx(0.75)
    for _ in range(30):
        gain.round(one_round(1, 1, 40_000, 40_000), draft_active=True)
    assert gain.paused


def test_a_few_unlucky_rounds_do_not_condemn_a_draft_that_has_paid() -> None:
    tenant = Tenant()
    play(accepting(0.7, 42_000), tenant=tenant)
    gain = tenant.begin()
    assert gain is not None
    for _ in range(4):
        gain.round(one_round(1, 1, 42_000, PLAIN_US), draft_active=True)
    assert not gain.paused


def test_a_draft_that_is_never_in_time_rests_too() -> None:
    gain = begun(DraftRecord(measured=True))
    # It only keeps the memory busy: a round takes a fifth longer.
    rounds = 0
    while not gain.paused:
        gain.round(one_round(1, 0, 40_000, 33_000), draft_active=True)
        rounds += 1
    assert rounds < 15


def test_a_draft_that_is_hardly_ever_in_time_rests_however_well_it_was_known() -> None:
    gain = begun(DraftRecord(measured=True), 0.8)
    rounds = 0
    while not gain.paused:
        in_time = rounds % 20 == 3
        gain.round(one_round(2 if in_time else 1, int(in_time), 40_000, 35_000), draft_active=True)
        rounds += 1
    assert rounds < 40


def begun(record: DraftRecord, known: float = 0.5) -> SpeculationGain:
    gain = SpeculationGain()
    gain.begin(record, known)
    return gain


def failed(gain: SpeculationGain) -> None:
    """Until it is paused, a draft is wrong."""
    while not gain.paused:
        gain.round(one_round(1, 1, 45_000, PLAIN_US), draft_active=True)


def plainly(gain: SpeculationGain, rounds: int) -> None:
    for _ in range(rounds):
        gain.round(one_round(1, 0, PLAIN_US, PLAIN_US), draft_active=False)


def test_within_a_request_a_draft_is_tried_again_after_some_tokens_each_time_that_it_fails() -> None:
    gain = begun(DraftRecord(measured=True))
    for _ in range(4):
        failed(gain)
        plainly(gain, USUAL_TOKENS - 1)
        assert gain.paused
        plainly(gain, 1)
        assert not gain.paused


def test_a_request_that_always_drafts_gives_evidence_and_is_never_paused() -> None:
    gain = begun(DraftRecord(measured=True))
    for _ in range(100):
        gain.round(one_round(1, 1, 45_000, PLAIN_US, verified=4), draft_active=True, may_pause=False)
    assert not gain.paused
    taken = gain.record.take()
    assert (taken.rounds, taken.verified, taken.accepted) == (100, 400, 0)
    assert taken.saved == pytest.approx(-50)
    assert gain.record.evidence.rounds == 0


def test_a_draft_that_never_answers_is_missing_in_all_rounds_but_those_of_its_prefill() -> None:
    gain = begun(DraftRecord(measured=True))
    plainly(gain, 8)
    assert gain.record.evidence.missed == 0
    plainly(gain, 5)
    assert gain.record.evidence.missed == 5
    gain.round(one_round(2, 1, 40_000, PLAIN_US), draft_active=True)
    gain.begin(gain.record, 0.5)
    plainly(gain, 8)
    assert (gain.record.evidence.missed, gain.record.evidence.rounds) == (5, 1)


def test_a_draft_gets_no_credit_for_what_the_target_drafts_itself() -> None:
    def evidence(own: bool) -> Evidence:
        gain = SpeculationGain()
        commit = sequence.Commit(token_ids=[1, 2, 3], num_drafted=3, num_verified=3, num_accepted=2)
        commit.sources.add(source="model", num_drafted=1, num_verified=1, num_accepted=0 if own else 1)
        commit.sources.add(source="ngram", own=own, num_drafted=2, num_verified=2, num_accepted=2 if own else 1)
        for _ in range(20):
            seen = RoundSums()
            seen.add(Commit.from_commit(commit, PLAIN_US), 2 * PLAIN_US)
            gain.round(seen, draft_active=True, may_pause=False)
        return gain.record.evidence

    of_all, of_the_draft = evidence(own=False), evidence(own=True)
    # Three tokens in the time of two plain rounds: two of them would have come without the draft.
    assert of_all.saved == pytest.approx(20 * 1.0) and of_the_draft.saved == pytest.approx(20 * -1.0)
    assert (of_the_draft.verified, of_the_draft.accepted, of_the_draft.late) == (20, 0, 0)


def test_what_a_draft_has_accepted_is_part_of_what_was_verified_of_it_whatever_the_target_drafts_beside_it() -> None:
    # At each of two places: a token of the worker, one that was looked up, and three alternatives of a head.
    commit = sequence.Commit(token_ids=[1, 2, 3], num_drafted=2, num_verified=2, num_accepted=2)
    commit.sources.add(source="model", num_drafted=2, num_verified=2, num_accepted=1)
    commit.sources.add(source="ngram", own=True, num_drafted=2, num_verified=2, num_accepted=1)
    commit.sources.add(source="mtp", own=True, num_drafted=6, num_verified=6, num_accepted=0)
    seen = RoundSums()
    seen.add(Commit.from_commit(commit, PLAIN_US), PLAIN_US)
    assert (seen.draft_verified, seen.accepted - seen.own_accepted) == (2, 1)


def test_a_round_with_the_targets_own_drafts_alone_is_one_without_the_draft() -> None:
    commit = sequence.Commit(token_ids=[1, 2], num_drafted=1, num_verified=1, num_accepted=1)
    commit.sources.add(source="ngram", own=True, num_drafted=1, num_verified=1, num_accepted=1)
    seen = RoundSums()
    seen.add(Commit.from_commit(commit, PLAIN_US), PLAIN_US)
    assert (seen.rounds, seen.in_time, seen.own_accepted) == (1, 0, 1)
