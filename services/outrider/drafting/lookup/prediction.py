"""Drafts from the output that the client predicts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.lookup.source import REACH, Found, LookupDrafts
from outrider.drafting.source import DraftSource, register
from outrider.options.prediction import Prediction
from outrider.sequence.spec import SequenceSpec

NAME = "prediction"


@register(NAME)
def predictions() -> DraftSource:
    return LookupDrafts(NAME, PredictionLookup.of)


class PredictionLookup:
    """The place of the answer in the prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction

    @classmethod
    def of(cls, opening: SequenceSpec) -> PredictionLookup | None:
        if not opening.prediction:
            return None
        prediction = Prediction(opening.prediction)
        prediction.extend(opening.committed)
        return cls(prediction)

    def extend(self, tokens: Sequence[int]) -> None:
        self._prediction.extend(tokens)

    def find(self, count: int) -> Found:
        matched = self._prediction.matched
        return self._prediction.upcoming(min(count, REACH * matched)), matched
