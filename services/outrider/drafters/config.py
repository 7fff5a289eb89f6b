"""Options of drafters."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# With the longest draft they make a tree that targets accept as a message.
MAX_SIBLINGS = 5
# In one position: the target hardly ever chooses further ones.
_MAX_OTHERS = 3


class DrafterKind(enum.StrEnum):
    MODEL = "model"
    NGRAM = "ngram"
    COMBINED = "combined"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a draft model drafts."""

    min_confidence: float = 0.4
    """A proposal ends when the chance that all of it is right has fallen under this; 0 never ends it early.

    Asked before each forward: a token more would save a step of the target that often at most, and costs a forward.
    """
    num_siblings: int = 4
    """Most alternatives that a proposal has to its tokens; 0 for none."""
    max_batch_tokens: int = 512
    """Most tokens of one forward."""
    catch_up_tokens: int = 128
    """Most tokens of one forward that go to sequences far behind, while others are ready to draft."""
    ready_lag: int = 32
    """A sequence this far behind at most counts as ready: its lag is ingested in the round it drafts in."""

    @property
    def others_looked_at(self) -> int:
        """In each position, for siblings."""
        return min(self.num_siblings, _MAX_OTHERS)

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence < 1:
            raise ValueError(f"min_confidence: {self.min_confidence} is not in [0, 1)")
        if not 0 <= self.num_siblings <= MAX_SIBLINGS:
            raise ValueError(f"num_siblings: {self.num_siblings} is not in [0, {MAX_SIBLINGS}]")
        for name in ("max_batch_tokens", "catch_up_tokens", "ready_lag"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """How a repetition is recognised."""

    min_match: int = 2
    """Shortest run of tokens whose earlier occurrence is continued.

    One of a single token is chance more often than quotation, and a model does better there; from two on n-grams win,
    measured on Spec-Bench: docs/benchmarks.md."""
    max_match: int = 8
    """A run this long is not compared further: the most recent one wins."""
    max_candidates: int = 128
    """Earlier occurrences of the shortest run that are looked at, most recent first."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(f"min_match: {self.min_match} is not between 1 and max_match ({self.max_match})")
        if self.max_candidates < 1:
            raise ValueError("max_candidates: must be at least 1")
