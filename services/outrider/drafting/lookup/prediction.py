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

    def __init__(self, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        self._prediction = Prediction(spec.prediction)
        self._tokens = tokens
        self._followed = len(spec.prompt)
        """Tokens with which the prediction was compared, and those before them."""

    @classmethod
    def of(cls, spec: SequenceSpec, tokens: Sequence[int]) -> PredictionLookup | None:
        return cls(spec, tokens) if spec.prediction else None

    def find(self, count: int) -> Found:
        fresh = self._tokens[self._followed :]
        self._prediction.extend(fresh)
        self._followed += len(fresh)
        matched = self._prediction.matched
        return self._prediction.upcoming(min(count, REACH * matched)), matched
