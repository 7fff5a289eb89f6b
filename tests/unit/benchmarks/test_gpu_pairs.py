"""The computed pairs take the time that their data sheets say, and texts are corrected as far as is asked."""

from __future__ import annotations

import random

import pytest
from outrider_controller.whatif.stack import VirtualStack
from outrider_controller.whatif.texts import Text, Texts

from benchmarks.scenarios.gpu_pairs import PAIRS, PLAIN
from benchmarks.support.known_texts import corrected

RIGHT, WRONG = 7, 8


def texts(share: float) -> Texts:
    chance = random.Random(2)
    guess = {True: [(RIGHT, 0.9)], False: [(WRONG, 0.3)]}
    made = [Text([1] * 20, [RIGHT] * 80, [guess[chance.random() < share] for _ in range(80)]) for _ in range(20)]
    return Texts(made, 64)


def share_right(found: Texts) -> float:
    guesses = [guess for text in found.texts for guess in text.guesses]
    return sum(guess[0][0] == RIGHT for guess in guesses) / len(guesses)


def test_guesses_are_corrected_as_far_as_is_asked() -> None:
    assert share_right(corrected(texts(0.4), 0.75)) == pytest.approx(0.75, abs=0.03)
    assert share_right(corrected(texts(0.8), 0.5)) == share_right(texts(0.8)), "none is made wrong"


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_plain_token_takes_a_step_and_the_host(pair) -> None:  # type: ignore[no-untyped-def]
    ran = VirtualStack(texts(0.5), PLAIN.setup(pair, 0.0, 1)).run(2.0, 0.5)
    assert ran.tokens_per_s == pytest.approx(1 / (pair.target.step_s(1, 1) + 0.0003), rel=0.03)
