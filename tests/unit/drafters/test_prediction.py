"""What a client predicts is drafted where the answer follows it, and found again behind an edit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from outrider.options.prediction import Prediction
from outrider.sequence.spec import SequenceSpec

Greedy = Callable[..., SequenceSpec]
PREDICTED = list(range(100, 200))


def drafted_right(prediction: Prediction, answer: list[int], ahead: int = 8) -> tuple[int, int]:
    """(steps, tokens proposed in vain) of a decoder that commits what is right of each proposal and one token more."""
    at, steps, vain = 0, 0, 0
    while at < len(answer):
        upcoming = prediction.upcoming(ahead)
        right = next((i for i, token in enumerate(upcoming) if answer[at + i : at + i + 1] != [token]), len(upcoming))
        vain += len(upcoming) - right
        prediction.extend(answer[at : at + right + 1])
        at += right + 1
        steps += 1
    return steps, vain


def test_a_right_prediction_is_proposed_to_its_end() -> None:
    prediction = Prediction(PREDICTED)
    assert drafted_right(prediction, PREDICTED) == (-(-100 // 9), 0)
    assert (prediction.num_accepted, prediction.num_rejected) == (100, 0)
    assert prediction.upcoming(4) == ()


@pytest.mark.parametrize(
    ("edited", "steps", "accepted"),
    [
        pytest.param([*PREDICTED[:50], 1, *PREDICTED[51:]], 13, 99, id="another token"),
        pytest.param([*PREDICTED[:50], *PREDICTED[60:]], 12, 90, id="tokens left out"),
        pytest.param([*PREDICTED[:50], 1, 2, 3, 4, 5, *PREDICTED[50:]], 18, 99, id="tokens put in"),
        pytest.param([*PREDICTED[50:], *PREDICTED[:50]], 16, 95, id="halves exchanged"),
    ],
)
def test_behind_an_edit_the_prediction_goes_on(edited: list[int], steps: int, accepted: int) -> None:
    prediction = Prediction(PREDICTED)
    assert drafted_right(prediction, edited)[0] <= steps
    assert accepted <= prediction.num_accepted <= len(PREDICTED)


def test_an_answer_of_its_own_is_left_alone() -> None:
    prediction = Prediction(PREDICTED)
    prediction.extend([1, 2, 3])
    assert prediction.upcoming(4) == ()
    prediction.extend([140, 141])
    assert prediction.upcoming(2) == (142, 143)


def test_of_repeated_runs_the_nearest_is_gone_on_with() -> None:
    line = [7, 8]
    predicted = [*line, 1, *line, 2, *line, 3, *line, 4]
    prediction = Prediction(predicted)
    prediction.extend([*line, 1, *line, 9, *line])
    assert prediction.upcoming(1) == (3,)


def test_it_does_not_matter_how_the_answer_comes() -> None:
    rng = random.Random(1)
    answer = [token for token in PREDICTED if rng.random() > 0.1]
    whole, pieces = Prediction(PREDICTED), Prediction(PREDICTED)
    whole.extend(answer[:80])
    for token in answer[:80]:
        pieces.extend([token])
    assert whole.upcoming(9) == pieces.upcoming(9)
    assert whole.num_accepted == pieces.num_accepted
