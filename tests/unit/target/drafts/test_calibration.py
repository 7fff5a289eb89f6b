"""What drafts say becomes the share that is accepted; for whom it is wrong, it is soon not believed."""

from __future__ import annotations

import math
import random

import pytest
from outrider.target.drafts.calibration import Bin, Calibration, Fit, bin_of


def judged(calibration: Calibration, each: Bin, share: float, *, times: int, fit: Fit | None = None) -> Fit:
    chance, fit = random.Random(1), fit or Fit()
    for _ in range(times):
        calibration.verified([each], chance.random() < share, fit)
    return fit


def test_before_anything_was_judged_tokens_are_given_a_chance_whatever_is_said_of_them() -> None:
    def first(said: Bin) -> float:
        return Calibration().own(said, Fit())

    assert first(bin_of("model", 0.93)) > 0.95
    assert first(bin_of("model", 0.35)) == pytest.approx(0.675)
    assert first(bin_of("model", 0.01)) > 0.5
    assert first(bin_of("ngram", None, 2)) > first(bin_of("model", 0.35))


def test_a_draft_that_is_right_whatever_it_says_is_found_out() -> None:
    calibration, doubted = Calibration(), bin_of("model", 0.01)
    judged(calibration, doubted, 1.0, times=200)
    assert calibration.own(doubted, Fit()) > 0.93


def test_the_share_accepted_takes_the_place_of_what_was_said() -> None:
    calibration = Calibration()
    fit = Fit()
    for share, said in ((0.4, 0.93), (0.9, 0.55)):
        judged(calibration, bin_of("model", said), share, times=600, fit=fit)
        # A new text, of which nothing is known.
        assert calibration.own(bin_of("model", said), Fit()) == pytest.approx(share, abs=0.08)


def test_a_longer_match_is_another_bin_and_one_source_says_nothing_of_another() -> None:
    calibration = Calibration()
    judged(calibration, bin_of("ngram", None, 2), 0.1, times=300)
    assert calibration.own(bin_of("ngram", None, 2), Fit()) < 0.2
    assert calibration.own(bin_of("ngram", None, 8), Fit()) > 0.8
    assert calibration.own(bin_of("model", 0.65), Fit()) > 0.6


@pytest.mark.parametrize("confidence", [0.05, 0.95])
def test_a_drawn_tokens_own_confidence_does_not_decide_its_chance(confidence: float) -> None:
    calibration = Calibration()
    drawn, other = bin_of("m", confidence, drawn=True), bin_of("m", 0.5, drawn=True)
    assert calibration.usual(drawn, Fit()) == calibration.usual(other, Fit()) == 0.75


def test_what_was_looked_up_was_not_drawn_so_its_match_decides_its_chance() -> None:
    short, long = (bin_of("ngram", None, matched, drawn=True) for matched in (2, 8))
    assert Calibration().usual(short, Fit()) < Calibration().usual(long, Fit())


def test_a_token_that_is_not_hoped_for_has_the_chance_that_its_source_gives_it() -> None:
    assert Calibration().own(bin_of("model", 0.35), Fit(), explore=False) == pytest.approx(0.35)


def test_a_text_that_its_draft_cannot_guess_is_not_believed_within_sixty_tokens_and_tried_again_later() -> None:
    calibration, sure = Calibration(), bin_of("model", 0.97)
    judged(calibration, sure, 0.97, times=500)
    fit = judged(calibration, sure, 0.0, times=60)
    assert calibration.own(sure, fit) < 0.3
    # Others are believed as before, or nearly.
    assert calibration.own(sure, Fit()) > 0.6
    for _ in range(120):
        calibration.verified([], 0, fit)
    assert calibration.own(sure, fit) > 0.5


def test_a_new_text_starts_from_what_its_tenants_texts_have_shown_and_other_tenants_from_nothing() -> None:
    calibration, sure = Calibration(), bin_of("model", 0.97)
    for _ in range(20):
        judged(calibration, sure, 0.97, times=20, fit=calibration.fit("inside"))
        judged(calibration, sure, 0.1, times=2, fit=calibration.fit("outside"))
    inside, outside, new = (calibration.own(sure, calibration.fit(tenant)) for tenant in ("inside", "outside", "new"))
    assert outside < 0.35
    assert inside > 0.85
    assert new > 0.8


def test_a_text_that_does_better_than_others_makes_a_long_chain_likelier_but_not_sure() -> None:
    calibration, often = Calibration(), bin_of("ngram", None, 5)
    judged(calibration, often, 0.8, times=500)
    better = judged(calibration, often, 1.0, times=30)
    usual = calibration.own(often, Fit())
    assert usual < calibration.own(often, better) < 0.93
    # Sixteen in a row are right as seldom as that says.
    assert calibration.own(often, better) ** 16 < 0.3


def test_a_run_of_hundreds_of_tokens_is_not_believed_less_because_shorter_ones_ended() -> None:
    calibration = Calibration()
    judged(calibration, bin_of("suffix", None, 20), 0.7, times=300)
    judged(calibration, bin_of("suffix", None, 300), 1.0, times=300)
    assert calibration.own(bin_of("suffix", None, 20), Fit()) < 0.8
    assert calibration.own(bin_of("suffix", None, 299), Fit()) > 0.98
    assert len({bin_of("suffix", None, matched) for matched in range(1, 10_000)}) < 20, "the table is small"


def test_a_tenant_whose_drafts_were_useless_is_tried_again_when_it_has_decoded_plainly_for_long() -> None:
    calibration, sure = Calibration(), bin_of("model", 0.97)
    judged(calibration, sure, 0.97, times=500)
    fit = judged(calibration, sure, 0.0, times=60, fit=calibration.fit("tenant"))
    before = calibration.own(sure, calibration.fit("tenant"))
    for _ in range(600):
        calibration.verified([], 0, fit)
    assert before < 0.3
    assert calibration.own(sure, calibration.fit("tenant")) > 0.5


def test_clients_that_invent_tenants_fill_no_table() -> None:
    calibration = Calibration()
    for number in range(5000):
        calibration.fit(f"tenant {number}")
    assert len(calibration._tenants) <= 4096


def test_what_is_no_longer_judged_comes_back_to_what_is_said_of_it() -> None:
    calibration, sure = Calibration(), bin_of("model", 0.97)
    judged(calibration, sure, 0.0, times=100)
    before = calibration.own(sure, Fit())
    for _ in range(3000):
        calibration.stepped()
    assert before < 0.15
    assert calibration.own(sure, Fit()) > 0.7


def test_a_draft_that_invents_sources_fills_no_table() -> None:
    calibration = Calibration()
    for number in range(1000):
        calibration.verified([bin_of(f"part {number}", 0.5)], 1, Fit())
    assert len(calibration._shares) < 50


@pytest.mark.parametrize("confidence", [math.nan, -1.0, math.inf, 1.00001])
def test_a_chance_that_is_no_number_is_as_good_as_none(confidence: float) -> None:
    chance = Calibration().own(bin_of("model", confidence), Fit())
    assert 0 < chance < 1
