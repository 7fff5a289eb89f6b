"""Whether a draft pays: played with a clock of its own, request after request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from outrider_controller.router.worth import FIRST_REST_TOKENS, Standing, Worth

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


def play(drafted: Round, *, requests: int = 12, length: int = 64, standing: Standing | None = None) -> Played:
    """Requests one after the other. A draft speaks from its second round on after it was opened or tried again."""
    rng, played, standing = random.Random(7), Played(), standing or Standing()
    for _ in range(requests):
        worth = Worth()
        worth.begin(standing)
        tokens, rounds_awake = 0, 0
        while tokens < length:
            spoken = not worth.resting and rounds_awake > 0
            count, us = drafted(rng) if spoken else (1, PLAIN_US)
            rounds_awake = 0 if worth.resting else rounds_awake + 1
            worth.round(num_tokens=count, num_in_time=int(spoken), round_us=us, step_us=PLAIN_US, spoken=spoken)
            tokens += count
            played.us += us
            played.drafted_rounds += spoken
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
    standing = Standing()
    assert play(wrong, standing=standing).ratio > 0.95
    assert play(wrong, standing=standing).ratio > 0.985
    assert standing.rest_tokens > 4 * FIRST_REST_TOKENS


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
    standing = Standing()
    before = play(good, requests=40, standing=standing).ratio
    assert play(busy, requests=requests, standing=standing).ratio > 0.95
    play(good, standing=standing)
    assert play(good, requests=40, standing=standing).ratio > 0.97 * before


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
    standing = Standing()
    play(accepting(0.7, 42_000), standing=standing)
    for _ in range(20):
        assert play(accepting(0.1, 45_000), requests=1, length=128, standing=standing).ratio > 0.8
        assert not begun(standing).resting
        assert play(accepting(0.7, 42_000), requests=1, length=128, standing=standing).ratio > 1.3


def test_a_draft_that_becomes_good_is_found_out():
    standing = Standing()
    play(accepting(0.0, 45_000), requests=30, standing=standing)
    recovered = play(accepting(0.7, 42_000), requests=30, standing=standing)
    assert recovered.ratio > 1.5
    assert not standing.doubtful


def test_what_a_plain_round_takes_is_measured_with_the_draft_at_rest_before_a_small_saving_is_believed():
    worth = Worth()
    worth.begin(Standing())
    # Beside the draft a step takes a third longer than it does alone, so this draft seems to lose nothing.
    while not worth.resting:
        worth.round(num_tokens=1, num_in_time=1, round_us=40_000, step_us=40_000, spoken=True)
    assert worth.standing.left == 0 and not worth.standing.doubtful
    while worth.resting:
        worth.round(num_tokens=1, num_in_time=0, round_us=PLAIN_US, step_us=PLAIN_US, spoken=False)
    assert worth.standing.plain_share == pytest.approx(0.75)
    for _ in range(30):
        worth.round(num_tokens=1, num_in_time=1, round_us=40_000, step_us=40_000, spoken=True)
    assert worth.resting


def test_a_few_unlucky_rounds_do_not_condemn_a_draft_that_has_paid():
    standing = Standing()
    play(accepting(0.7, 42_000), standing=standing)
    worth = Worth()
    worth.begin(standing)
    for _ in range(4):
        worth.round(num_tokens=1, num_in_time=1, round_us=42_000, step_us=PLAIN_US, spoken=True)
    assert not worth.resting


def test_a_draft_that_is_never_in_time_rests_too():
    worth = Worth()
    worth.begin(Standing(measured=True))
    # It only keeps the memory busy: a round takes a fifth longer.
    rounds = 0
    while not worth.resting:
        worth.round(num_tokens=1, num_in_time=0, round_us=40_000, step_us=33_000, spoken=True)
        rounds += 1
    assert rounds < 15


def test_a_draft_that_is_hardly_ever_in_time_rests_however_well_it_was_known():
    worth = Worth()
    worth.begin(Standing(saving=0.8, measured=True))
    rounds = 0
    while not worth.resting:
        in_time = rounds % 20 == 3
        worth.round(
            num_tokens=2 if in_time else 1, num_in_time=int(in_time), round_us=40_000, step_us=35_000, spoken=True
        )
        rounds += 1
    assert rounds < 40


def begun(standing: Standing) -> Worth:
    worth = Worth()
    worth.begin(standing)
    return worth


def plainly(worth: Worth, rounds: int) -> None:
    for _ in range(rounds):
        worth.round(num_tokens=1, num_in_time=0, round_us=PLAIN_US, step_us=PLAIN_US, spoken=False)


def test_one_new_request_tries_again_while_the_others_go_on_resting():
    standing = Standing()
    standing.failed()
    resting = begun(standing)
    assert resting.resting
    plainly(resting, FIRST_REST_TOKENS)
    # Not in the middle of a short request: the draft would have to read all of it again.
    assert resting.resting
    trying, third = begun(standing), begun(standing)
    assert (trying.resting, third.resting) == (False, True)
    standing.paid()
    assert not begun(standing).resting


def test_a_long_request_tries_again_by_itself():
    standing = Standing()
    standing.failed()
    worth = begun(standing)
    plainly(worth, 300)
    assert not worth.resting
