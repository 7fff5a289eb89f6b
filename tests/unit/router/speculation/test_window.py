"""The last 200 verified tokens of a request."""

from __future__ import annotations

from dataclasses import replace

from outrider.sequence.speculation import PLAIN
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.speculation.controller import Allowance, SpeculationController, Window
from outrider_controller.router.speculation.gain import DraftRecord

from tests.unit.router.speculation.test_controller import committed

ALLOWED = Allowance(5, 50_000)


def test_the_window_says_nothing_until_it_is_full_and_then_whether_it_is_low() -> None:
    window = Window()

    def low(accepted: int, rounds: int) -> list[bool]:
        """After each of so many rounds of four tokens."""
        found = []
        for _ in range(rounds):
            window.add(4, accepted)
            found.append(window.low)
        return found

    assert not any(low(0, 49))
    assert window.acceptance is None
    assert low(0, 2) == [True, True]
    assert not low(4, 60)[-1]
    assert window.acceptance == 1.0
    assert low(0, 60) == [False] * 25 + [True] * 35


def played(controller: SpeculationController, rounds: int, *, accepted: int) -> list[int]:
    """Most drafted tokens, after each of so many rounds of four drafted tokens and a step of 20 ms."""
    sent = []
    for number in range(rounds):
        fields = {"num_drafted": 4, "num_verified": 4, "num_accepted": accepted}
        committed(controller, 100 + number, number * 21_000, num_tokens=accepted + 1, **fields)
        controller.draft_active(5_000)
        sent.append(controller.sent.max_draft_tokens)
    return sent


def test_low_acceptance_alone_turns_nothing_off_that_saves_time() -> None:
    controller = SpeculationController(PolicyConfig(), ALLOWED)
    controller.opened(5, DraftRecord())
    assert set(played(controller, 100, accepted=1)) == {5}
    assert controller.window.low


def test_below_a_tenants_floor_the_rest_of_the_request_is_plain() -> None:
    controller = SpeculationController(PolicyConfig(), replace(ALLOWED, min_acceptance=0.4))
    controller.opened(5, DraftRecord())
    sent = played(controller, 100, accepted=1)
    assert sent[49] == 5
    assert set(sent[60:]) == {0}
    assert controller.sent == PLAIN
    # Whatever else becomes of it.
    assert controller.allow(replace(ALLOWED, min_acceptance=0.4, always_draft=True)) is None


def test_below_a_floor_above_one_half_the_alarm_is_given_before_the_request_is_plain() -> None:
    controller = SpeculationController(PolicyConfig(), replace(ALLOWED, min_acceptance=0.8))
    controller.opened(5, DraftRecord())
    assert set(played(controller, 100, accepted=3)[60:]) == {0}
    assert controller.window.acceptance == 0.75
    assert controller.window.low
