"""How many tokens a draft may propose, and how long it is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.speculation import PLAIN, Speculation
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.speculation.controller import Allowance, SpeculationController
from outrider_controller.router.speculation.gain import DraftRecord

CONFIG = PolicyConfig(max_draft_tokens=5, max_wait_us=50_000, silent_commits=3)
ALLOWED = Allowance(5, CONFIG.max_wait_us)
ALWAYS = replace(ALLOWED, always_draft=True)


def opened() -> SpeculationController:
    controller = SpeculationController(CONFIG, ALLOWED)
    assert controller.opened(5).max_draft_tokens == 5
    return controller


def a_round(
    committed_len: int, *, num_tokens: int, step_us: int = 20_000, wait_us: int = 1, source: str = "", **fields: int
) -> Round:
    """One after which so much is committed. `fields` are a Commit's."""
    commit = sequence.Commit(
        base_len=committed_len - num_tokens, token_ids=range(num_tokens), queue_us=wait_us, wait_us=wait_us, **fields
    )
    if source:
        commit.draft_stats.source = source
    return Round.from_commit(commit, step_us)


def committed(
    controller: SpeculationController,
    length: int,
    now_us: int,
    step_us: int = 20_000,
    *,
    num_tokens: int = 1,
    price: float = 0.0,
    **fields: int,
) -> Speculation | None:
    """A round before which the target waited, unless `wait_us` is given. `fields` are those of `a_round`."""
    return controller.committed(a_round(length, num_tokens=num_tokens, step_us=step_us, **fields), now_us, price)


def test_a_draft_is_waited_for_once_it_has_answered_a_commit() -> None:
    controller = opened()
    assert controller.opened(5).max_wait_us == 0
    controller.draft_active(0)
    committed(controller, 10, 0)
    assert committed(controller, 11, 20_000) is None
    controller.draft_active(2_000)
    assert committed(controller, 12, 40_000).max_wait_us == 20_000


def test_the_step_that_ends_the_prompt_is_not_taken_for_one_to_come() -> None:
    controller = opened()
    committed(controller, 10, 0, step_us=400_000)
    assert controller.times.step_us == 0
    committed(controller, 11, 20_000)
    assert controller.times.step_us == 20_000


def test_a_guess_said_unasked_answers_nothing() -> None:
    controller = opened()
    committed(controller, 10, 0)
    controller.draft_active(0)
    committed(controller, 11, 20_000)
    assert (controller.times.turnaround_us, controller.unanswered) == (0, 1)
    controller.draft_active(50_000)
    committed(controller, 12, 40_000)
    assert controller.times.turnaround_us == 50_000


def test_a_request_that_has_ended_has_cost_its_rounds_their_drafted_rows_and_its_waits() -> None:
    controller, record = SpeculationController(CONFIG, ALLOWED), DraftRecord()
    controller.opened(5, record)
    for number in range(4):
        fields = {"num_tokens": 2, "num_drafted": 3, "num_verified": 2, "num_accepted": 1, "wait_us": 5_000}
        committed(controller, 10 + 2 * number, number * 25_000, price=0.1, **fields)
    controller.ended()
    found = record.evidence
    assert (found.requests, found.request_tokens) == (1, 8)
    assert found.request_cost == pytest.approx(4 + 4 * 3 * 0.1 + 4 * 5_000 / 20_000)


def test_a_draft_says_with_a_round_that_it_works() -> None:
    controller = opened()
    silent(controller, 2)
    done = a_round(12, num_tokens=1, source="model")
    done.answer_us = 2_000
    assert controller.committed(done, 40_000, 0.0) is not None
    assert (controller.unanswered, controller.times.turnaround_us) == (1, 2_000)


def test_what_one_request_saw_of_a_draft_the_next_one_knows() -> None:
    record = DraftRecord()
    first, second = SpeculationController(CONFIG, ALLOWED), SpeculationController(CONFIG, ALLOWED)
    first.opened(5, record)
    committed(first, 10, 0)
    committed(first, 11, 20_000)
    first.draft_active(35_000)
    committed(first, 12, 40_000)
    second.opened(5, record)
    second.draft_active(0)
    assert committed(second, 10, 0) is None, "answers take 35 ms, a step 20"
    assert (second.times.turnaround_us, second.times.step_us) == (35_000, 20_000)


def test_a_draft_known_to_be_quick_is_waited_for_from_its_first_word_on() -> None:
    record = DraftRecord()
    first, second = SpeculationController(CONFIG, ALLOWED), SpeculationController(CONFIG, ALLOWED)
    assert first.opened(5, record).max_wait_us == 0
    committed(first, 10, 0)
    committed(first, 11, 20_000)
    first.draft_active(10_000)
    committed(first, 12, 40_000)
    assert second.opened(5, record).max_wait_us == 20_000


def test_rounds_on_the_way_when_the_target_was_told_to_wait_do_not_count_against_the_draft() -> None:
    # A target that decodes on while the draft is late hears of the decision to wait some rounds after it was made.
    controller = opened()
    committed(controller, 10, 0)
    committed(controller, 11, 20_000)
    controller.draft_active(10_000)
    assert committed(controller, 12, 40_000, wait_us=0).max_wait_us > 0
    for number in range(5):
        committed(controller, 13 + number, 60_000, wait_us=0)
        assert controller.sent.max_wait_us > 0
    for number in range(CONFIG.silent_commits):
        committed(controller, 18 + number, 80_000)
    assert controller.sent.max_wait_us == 0


def silent(controller: SpeculationController, rounds: int) -> list[Speculation | None]:
    """Commits that the draft leaves unanswered, 20 ms apart."""
    return [committed(controller, i, i * 20_000) for i in range(10, 10 + rounds)]


def test_a_draft_that_leaves_commits_unanswered_is_no_longer_waited_for_until_it_speaks() -> None:
    controller = opened()
    silent(controller, 2)
    controller.draft_active(500)
    settings = silent(controller, 5)
    assert settings[0].max_wait_us > 0
    assert settings[2].max_wait_us == 0 and settings[2].max_draft_tokens == 5
    assert settings[3:] == [None, None]
    controller.draft_active(500)
    assert silent(controller, 1)[0].max_wait_us > 0
    assert controller.times.turnaround_us == 500


def test_a_lost_draft_means_plain_decoding() -> None:
    controller = opened()
    controller.draft_active(500)
    assert controller.lost() == PLAIN
    assert silent(controller, 4) == [None] * 4


def played(controller: SpeculationController, rounds: int, *, drafted: int, accepted: int) -> list[int]:
    """Waits set during rounds of a 20 ms step and a 5 ms draft, with this many tokens accepted in each."""
    settings = []
    for i in range(100, 100 + rounds):
        now_us = i * 25_000
        settings.append(
            committed(controller, i, now_us, num_tokens=accepted + 1, num_drafted=drafted, num_accepted=accepted)
        )
        controller.draft_active(5_000)
    return [setting.max_wait_us for setting in settings if setting is not None]


def test_waiting_stops_for_a_draft_that_is_never_right_and_stays_for_one_that_is() -> None:
    assert played(opened(), 60, drafted=5, accepted=0)[-1] == 0
    assert played(opened(), 60, drafted=5, accepted=3)[-1] > 15_000


def test_a_client_that_asks_for_drafts_is_served_drafts_whether_or_not_they_pay() -> None:
    controller = SpeculationController(CONFIG, ALWAYS)
    assert controller.opened(5).max_wait_us == 50_000
    assert played(controller, 60, drafted=5, accepted=0) == []
    assert (controller.sent.max_draft_tokens, controller.sent.max_wait_us) == (5, 50_000)


def test_a_draft_is_judged_by_its_usual_answer_and_not_by_one_that_was_on_its_way() -> None:
    controller = opened()
    silent(controller, 2)
    for answer_us in (12_000, 200, 12_000, 90_000, 12_000):
        controller.draft_active(answer_us)
    assert silent(controller, 1) == [None]
    assert controller.times.turnaround_us == 12_000


def test_a_request_that_stopped_waiting_tries_again_later() -> None:
    controller = opened()
    played(controller, 60, drafted=5, accepted=0)
    assert max(played(controller, 300, drafted=0, accepted=0)) > 0


def test_settings_are_sent_when_they_change_noticeably_not_every_round() -> None:
    assert len(played(opened(), 200, drafted=5, accepted=2)) < 12


def in_turns(turns: int, *, accepted: int, round_us: int = 35_000, count: int = 60) -> SpeculationController:
    """After so many rounds, of which one in `turns` is thought over."""
    controller = SpeculationController(CONFIG, ALLOWED)
    controller.opened(5, DraftRecord())
    for number in range(count):
        done = a_round(
            100 + number,
            num_tokens=accepted + 1,
            step_us=30_000 + 2_000 * (number % 2),
            num_drafted=4,
            num_verified=4,
            num_accepted=accepted,
            source="model",
        )
        controller.committed(done, number * round_us, 0.0, decides=number % turns == turns - 1)
        controller.draft_active(5_000)
    return controller


@pytest.mark.parametrize("turns", [2, 3, 5])
def test_rounds_that_are_not_thought_over_at_once_count_no_less(turns: int) -> None:
    every, some = in_turns(1, accepted=2), in_turns(turns, accepted=2)
    assert some.acceptance.per_step == pytest.approx(every.acceptance.per_step, rel=0.02)
    assert some.times.step_us == pytest.approx(every.times.step_us, rel=0.03)
    assert some.record.evidence.saved == pytest.approx(every.record.evidence.saved, rel=0.05)
    assert some.sent.max_draft_tokens == every.sent.max_draft_tokens == 5
    assert min(some.sent.max_wait_us, every.sent.max_wait_us) > 30_000


@pytest.mark.parametrize("active", [False, True])
def test_a_draft_that_gives_nothing_is_missed_until_it_has_answered_and_late_from_then_on(active: bool) -> None:
    controller, record = SpeculationController(CONFIG, ALLOWED), DraftRecord()
    controller.opened(5, record)
    for number in range(14):
        if active:
            controller.draft_active(5_000)
        # The first round ended the prompt; in the next eight it may still prefill.
        committed(controller, 10 + number, number * 20_000)
        found = record.evidence
        assert found.late + found.missed == (number - 8 if number > 8 else 0)
    assert (found.rounds, found.late, found.missed) == ((5, 5, 0) if active else (0, 0, 5))


@pytest.mark.parametrize("late", [False, True])
def test_a_draft_that_mostly_answers_what_no_step_takes_is_not_waited_for(late: bool) -> None:
    """An answer after the step has begun says nothing of what one in time would have brought."""
    controller, record = SpeculationController(CONFIG, ALLOWED), DraftRecord()
    controller.opened(5, record)
    for number in range(40):
        fields = {"num_drafted": 1, "num_verified": 1, "num_accepted": 1} if number % 5 == 0 else {}
        wait_us = 1_000 if late else 5_000
        done = a_round(10 + number, num_tokens=1, step_us=20_000, wait_us=wait_us, source="model", **fields)
        done.answer_us = 4_500
        controller.committed(done, number * 25_000, 0.0)
    assert (controller.sent.max_wait_us > 0) is (record.evidence.late > 0) is late


OWN = replace(ALLOWED, max_own_draft_tokens=3)
ALONE = Speculation(0, 0, max_own_draft_tokens=3)


def test_a_target_makes_its_own_drafts_with_a_draft_worker_and_without() -> None:
    controller = SpeculationController(CONFIG, OWN)
    assert controller.opened(5).max_own_draft_tokens == 3
    assert controller.lost() == ALONE
    assert SpeculationController(CONFIG, OWN).lost() == ALONE


def test_what_a_target_drafts_itself_changes_with_what_is_allowed_also_without_a_draft_worker() -> None:
    controller = SpeculationController(CONFIG, OWN)
    controller.lost()
    assert controller.allow(ALLOWED) == PLAIN
    assert controller.allow(ALLOWED) is None
    assert controller.allow(OWN) == ALONE
