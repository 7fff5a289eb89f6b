"""Options of drafters. Outside their package, so that a command line is read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.configuration import NO_OPTION

# With the longest draft they make a tree that targets accept as a message.
MAX_ALTERNATIVES = 5
# In one position: the target hardly ever chooses further ones.
_MAX_OTHERS = 3


@dataclass(frozen=True, slots=True)
class ModelConfig:
    min_confidence: float = 0.4
    """A proposal ends when the estimated probability that all of it is accepted falls below this. 0: never.

    Asked before each forward: a token more would save a step of the target that often at most, and costs a forward.
    """
    num_alternatives: int = 4
    """Most branches of a proposal beside its main path. 0: chains only."""
    max_batch_tokens: int = 512
    """Most tokens of one forward."""
    catch_up_tokens: Annotated[int, NO_OPTION] = 128
    """Most tokens of one forward pass for sequences that have to catch up, while others are ready to draft."""
    ready_lag: Annotated[int, NO_OPTION] = 32
    """A sequence that is at most this many tokens behind drafts at once: the missing tokens are read in the same
    round."""

    @property
    def others_looked_at(self) -> int:
        """In each position, for alternatives."""
        return min(self.num_alternatives, _MAX_OTHERS)

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence < 1:
            raise ValueError(f"min_confidence: {self.min_confidence} is not in [0, 1)")
        if not 0 <= self.num_alternatives <= MAX_ALTERNATIVES:
            raise ValueError(f"num_alternatives: {self.num_alternatives} is not in [0, {MAX_ALTERNATIVES}]")
        for name in ("max_batch_tokens", "catch_up_tokens", "ready_lag"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
