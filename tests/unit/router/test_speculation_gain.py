"""Whether a draft pays: played with a clock of its own, request after request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from outrider_controller.router.speculation_gain import FIRST_REST_TOKENS, DraftRecord, SpeculationGain

PLAIN_US = 30_000
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


def play(drafted: Round, *, requests: int = 12, length: int = 64, record: DraftRecord | None = None) -> Played:
    """Requests one after the other. A draft speaks from its second round on after it was opened or tried again."""
    rng, played, record = random.Random(7), Played(), record or DraftRecord()
    for _ in range(requests):
        gain = SpeculationGain()
        gain.begin(record)
        tokens, rounds_awake = 0, 0
        while tokens < length:
            draft_active = not gain.resting and rounds_awake > 0
            count, us = drafted(rng) if draft_active else (1, PLAIN_US)
            rounds_awake = 0 if gain.resting else rounds_awake + 1
            gain.round(
                num_tokens=count,
                num_in_time=int(draft_active),
                round_us=us,
                step_us=PLAIN_US,
                draft_active=draft_active,
            )
            tokens += count
            played.us += us
            played.drafted_rounds += draft_active
        played.tokens += tokens
    return played


def accepting(chance: float, us: int, most: int = 5) -> Round:
    def drafted(rng: random.Random) -> tuple[int, int]:
        count = 1
        while count <= most and rng.random() < chance:
            count += 1
        return count, us

    return drafted


def test_a_draft_that_is_always_wrong_costs_less_than_a_twentieth_and_soon_next_to_nothing():
    wrong = accepting(0.0, 45_000)
    record = DraftRecord()
    assert play(wrong, record=record).ratio > 0.95
    assert play(wrong, record=record).ratio > 0.985
    assert record.rest_tokens > 4 * FIRST_REST_TOKENS


def test_a_draft_that_pays_is_hardly_ever_at_rest():
    good = accepting(0.6, 42_000)
    always = Played()
    rng = random.Random(7)
    for _ in range(400):
        tokens, us = good(rng)
        always.tokens, always.us = always.tokens + tokens, always.us + us
    # In every request one round goes by before it speaks.
    assert play(good, requests=40).ratio > 0.93 * always.ratio


@pytest.mark.parametrize("requests", [8, 80])
def test_a_draft_whose_machine_was_busy_for_a_while_is_soon_in_use_again(requests: int):
    def busy(rng: random.Random) -> tuple[int, int]:
        return good(rng)[0], rng.choice([45_000, 75_000, 150_000])

    good = accepting(0.6, 42_000)
    record = DraftRecord()
    before = play(good, requests=40, record=record).ratio
    assert play(busy, requests=requests, record=record).ratio > 0.95
    play(good, record=record)
    assert play(good, requests=40, record=record).ratio > 0.97 * before


def test_a_draft_that_hardly_pays_is_never_much_of_a_loss():
    for us in (54_000, 58_000, 63_000, 70_000):
        assert play(accepting(0.5, us), requests=40).ratio > 0.97


def test_unlucky_stretches_do_not_put_a_draft_to_rest_that_pays_a_fifth():
    # 1.9 tokens a round of 1.5 plain ones: more than half of its rounds save nothing.
    paying = accepting(0.47, int(1.5 * PLAIN_US))
    always = Played()
    rng = random.Random(7)
    for _ in range(2000):
        tokens, us = paying(rng)
        always.tokens, always.us = always.tokens + tokens, always.us + us
    assert always.ratio > 1.15
    assert play(paying, requests=40).ratio > 0.93 * always.ratio


def test_a_text_that_it_cannot_guess_does_not_cost_the_next_one_its_draft():
    record = DraftRecord()
    play(accepting(0.7, 42_000), record=record)
    for _ in range(20):
        assert play(accepting(0.1, 45_000), requests=1, length=128, record=record).ratio > 0.8
        assert not begun(record).resting
        assert play(accepting(0.7, 42_000), requests=1, length=128, record=record).ratio > 1.3


def test_a_draft_that_becomes_good_is_found_out():
    record = DraftRecord()
    play(accepting(0.0, 45_000), requests=30, record=record)
    recovered = play(accepting(0.7, 42_000), requests=30, record=record)
    assert recovered.ratio > 1.5
    assert not record.doubtful


def test_what_a_plain_round_takes_is_measured_with_the_draft_at_rest_before_a_small_saving_is_believed():
    gain = SpeculationGain()
    gain.begin(DraftRecord())
    # Beside the draft a step takes a third longer than it does alone, so this draft seems to lose nothing.
    while not gain.resting:
        gain.round(num_tokens=1, num_in_time=1, round_us=40_000, step_us=40_000, draft_active=True)
    assert gain.record.left == 0 and not gain.record.doubtful
    while gain.resting:
        gain.round(num_tokens=1, num_in_time=0, round_us=PLAIN_US, step_us=PLAIN_US, draft_active=False)
    assert gain.record.plain_share == pytest.approx(0.75)
    for _ in range(30):
        gain.round(num_tokens=1, num_in_time=1, round_us=40_000, step_us=40_000, draft_active=True)
    assert gain.resting


def test_a_few_unlucky_rounds_do_not_condemn_a_draft_that_has_paid():
    record = DraftRecord()
    play(accepting(0.7, 42_000), record=record)
    gain = SpeculationGain()
    gain.begin(record)
    for _ in range(4):
        gain.round(num_tokens=1, num_in_time=1, round_us=42_000, step_us=PLAIN_US, draft_active=True)
    assert not gain.resting


def test_a_draft_that_is_never_in_time_rests_too():
    gain = SpeculationGain()
    gain.begin(DraftRecord(measured=True))
    # It only keeps the memory busy: a round takes a fifth longer.
    rounds = 0
    while not gain.resting:
        gain.round(num_tokens=1, num_in_time=0, round_us=40_000, step_us=33_000, draft_active=True)
        rounds += 1
    assert rounds < 15


def test_a_draft_that_is_hardly_ever_in_time_rests_however_well_it_was_known():
    gain = SpeculationGain()
    gain.begin(DraftRecord(saving=0.8, measured=True))
    rounds = 0
    while not gain.resting:
        in_time = rounds % 20 == 3
        gain.round(
            num_tokens=2 if in_time else 1, num_in_time=int(in_time), round_us=40_000, step_us=35_000, draft_active=True
        )
        rounds += 1
    assert rounds < 40


def begun(record: DraftRecord) -> SpeculationGain:
    gain = SpeculationGain()
    gain.begin(record)
    return gain


def plainly(gain: SpeculationGain, rounds: int) -> None:
    for _ in range(rounds):
        gain.round(num_tokens=1, num_in_time=0, round_us=PLAIN_US, step_us=PLAIN_US, draft_active=False)


def test_one_new_request_tries_again_while_the_others_go_on_resting():
    record = DraftRecord()
    record.failed()
    resting = begun(record)
    assert resting.resting
    plainly(resting, FIRST_REST_TOKENS)
    # Not in the middle of a short request: the draft would have to read all of it again.
    assert resting.resting
    trying, third = begun(record), begun(record)
    assert (trying.resting, third.resting) == (False, True)
    record.paid()
    assert not begun(record).resting


def test_a_long_request_tries_again_by_itself():
    record = DraftRecord()
    record.failed()
    gain = begun(record)
    plainly(gain, 300)
    assert not gain.resting
