"""Which positions of a draft are asked for, after what became of them."""

from __future__ import annotations

from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.lengths import Lengths
from outrider_controller.router.policy import Pace

from tests.unit.router.test_policy import a_round

DRAFTING = 0.04
"""Steps that drafting a token takes."""


def after(*drafts: tuple[str, int, int]) -> Lengths:
    lengths = Lengths()
    for source, num_verified, num_accepted in drafts:
        lengths.judged(source, num_verified=num_verified, num_accepted=num_accepted)
    return lengths


def test_all_that_is_allowed_is_asked_for_while_nothing_speaks_against_it():
    assert Lengths().limit(5) == 5
    # A draft that is right one time in three at every position, and a few that were all wrong.
    assert after(*[("model", 1, 0), ("model", 2, 1), ("model", 3, 3)] * 20).limit(5, DRAFTING) == 5
    assert after(*[("model", 1, 0)] * 10).limit(5, DRAFTING) == 5


def test_a_position_at_which_nothing_is_accepted_is_not_asked_for():
    assert after(*[("model", 3, 2)] * 40).limit(5, DRAFTING) == 2
    assert after(*[("model", 2, 1)] * 40).limit(5, DRAFTING) == 1


def test_what_takes_the_draft_long_has_to_be_right_more_often():
    seldom = after(*[("model", 2, 1)] * 17, *[("model", 2, 2)] * 1)
    assert seldom.limit(5, 0.02) == 5
    assert seldom.limit(5, 0.20) == 1


def test_one_position_is_always_asked_for_whether_any_pays_is_not_said_here():
    assert after(*[("model", 1, 0)] * 200).limit(5, DRAFTING) == 1


def test_guesses_that_fail_do_not_cut_off_quotations():
    mixed = [("model", 2, 1), ("ngram", 5, 5)] * 40
    assert after(*mixed).limit(5, DRAFTING) == 5
    assert after(*(draft for draft in mixed if draft[0] == "model")).limit(5, DRAFTING) == 1


def test_what_is_not_asked_for_is_tried_again_later():
    lengths = after(*[("model", 3, 2)] * 40)
    tried = []
    for _ in range(60):
        most = lengths.limit(5, DRAFTING)
        tried.append(most)
        lengths.judged("model", num_verified=min(most, 3), num_accepted=2)
    # Once found wrong again, soon given up again.
    assert tried[0] == 2 and 1 <= sum(most > 2 for most in tried) <= 20


def test_evidence_fades_however_much_there_was():
    # Enough for weights to outgrow any bound many times over.
    lengths = after(*[("model", 3, 2)] * 20_000)
    assert lengths.limit(5, DRAFTING) == 2
    for _ in range(400):
        lengths.judged("model", num_verified=3, num_accepted=3)
    assert lengths.limit(5, DRAFTING) == 5


def test_names_that_a_draft_makes_up_are_bounded():
    lengths = after(*((f"made up {number}", 1, 0) for number in range(1000)))
    assert len(lengths._sources) <= 8


def test_the_setting_that_is_sent_follows_and_is_not_sent_without_a_change():
    pace = Pace(PolicyConfig(max_draft_tokens=5), 5, insistent=True)
    assert pace.opened(5).max_draft_tokens == 5
    sent = []
    for number in range(80):
        done = a_round(
            10 + number,
            num_tokens=2,
            step_us=10_000,
            num_drafted=2,
            # A target that claims more than was asked for is believed no further than that.
            num_verified=10**9 if number == 0 else 2,
            num_accepted=1,
            wait_us=0,
            source="model",
        )
        setting = pace.committed(done, 20_000 * number)
        sent += [setting.max_draft_tokens] if setting is not None else []
    assert sent == [1]
