"""The draft buffer of one sequence: guesses for the positions from its committed length on.

The target owns the truth; what is here are guesses, possibly late, repeated, reordered or invented. They are trimmed
where they equal the truth, dropped where they do not fit, and never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.speculation import DraftDistribution, InvalidField, SamplingParams, VerificationMode


class Arrival(NamedTuple):
    """Which message brought a token, and when."""

    serial: int
    received_s: float


@dataclass(frozen=True, slots=True)
class OfferedDraft:
    """One Draft message whose own fields are in range."""

    epoch: int
    base_len: int
    """Position of the first token; a position counts from the first prompt token."""
    token_ids: tuple[int, ...]
    q: tuple[DraftDistribution, ...] = ()
    """What each token was drawn from, or nothing."""
    params: SamplingParams | None = None
    """The sampling that q was computed under."""
    serial: int = 0
    """The router's number for this message, which the commit names again; 0 when it has none."""
    received_s: float = 0.0
    """Monotonic."""

    @property
    def arrival(self) -> Arrival:
        return Arrival(self.serial, self.received_s)

    def check(self, params: SamplingParams, mode: VerificationMode) -> None:
        """Raises InvalidField when ratio verification could not be exact with this draft."""
        if mode is not VerificationMode.RATIO or not self.token_ids:
            return
        if len(self.q) != len(self.token_ids):
            raise InvalidField("q", f"ratio mode needs one per token, got {len(self.q)} for {len(self.token_ids)}")
        if self.params != params:
            raise InvalidField("sampling", "q was computed under a sampling that is not the sequence's")


@dataclass(slots=True)
class DraftBuffer:
    """Drafted tokens for the positions from the committed length on, without gaps."""

    epoch: int = 0
    """Of the tokens held. Epochs order what one draft says; another draft that takes over counts anew."""
    token_ids: list[int] = field(default_factory=list)
    q: list[DraftDistribution] = field(default_factory=list)
    """One per token in ratio mode, else empty."""
    arrivals: list[Arrival] = field(default_factory=list)
    """One per token."""
    num_dropped: int = 0
    """Drafted tokens dropped since the last commit."""
    declined_len: int = -1
    """The committed length for which a draft said that it has nothing."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def offer(self, draft: OfferedDraft, committed: Sequence[int], capacity: int) -> None:
        """Takes what fits of `draft` and counts what does not. Keeps at most `capacity` tokens."""
        if not draft.token_ids:
            self.declined_len = max(self.declined_len, min(draft.base_len, len(committed)))
            return
        if self.token_ids and draft.epoch < self.epoch:
            self.num_dropped += len(draft.token_ids)
            return
        if draft.epoch > self.epoch:
            # The draft took its earlier guess back.
            self.cut(0)
        ahead = max(0, draft.base_len - len(committed))
        known = [*committed[draft.base_len :], *self.token_ids[ahead:]]
        overlap = len(committed) + len(self.token_ids) - draft.base_len
        if overlap < 0 or list(draft.token_ids[:overlap]) != known[: len(draft.token_ids)]:
            self.num_dropped += len(draft.token_ids)
            return
        self.epoch = draft.epoch
        self.token_ids.extend(draft.token_ids[overlap:])
        self.q.extend(draft.q[overlap:])
        self.arrivals.extend([draft.arrival] * (len(self.token_ids) - len(self.arrivals)))
        self.cut(capacity)

    def advance(self, committed: Sequence[int], num_judged: int) -> None:
        """Follows a commit of `committed`, in which the first `num_judged` tokens of the buffer were judged.

        Where every committed token equals the guess, the rest of the guess stays valid: also after a token that
        the target decoded plainly. Otherwise it is dropped, and counted as far as it was not judged.
        """
        count = len(committed)
        if self.token_ids[:count] == list(committed):
            del self.token_ids[:count]
            del self.q[:count]
            del self.arrivals[:count]
            return
        self.num_dropped += max(0, len(self.token_ids) - num_judged)
        self.token_ids.clear()
        self.q.clear()
        self.arrivals.clear()

    def cut(self, length: int) -> None:
        """Drops what lies beyond `length` tokens, and counts it."""
        self.num_dropped += max(0, len(self.token_ids) - length)
        del self.token_ids[length:]
        del self.q[length:]
        del self.arrivals[length:]

    def take_num_dropped(self) -> int:
        count, self.num_dropped = self.num_dropped, 0
        return count
