"""How much drafts may propose for one sequence, and how long a step may wait for them: a router decides it, its target
and its drafts go by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.errors import InvalidRequest
from outrider.limits import MAX_WAIT_US, MAX_WEIGHT
from outrider.tuning import MIN_CHANCE, WORTH_A_WAIT


@dataclass(frozen=True, slots=True)
class Speculation:
    """The default is plain decoding."""

    max_draft_tokens: int = 0
    """Most drafted tokens verified in one step, or of one proposal; 0 pauses a source."""
    max_wait_us: int = 0
    """Longest that the sequence is held back for a draft, in µs from the moment it is ready for a step."""
    weight: float = 1.0
    """What an accepted token is worth: a drafted one is verified when weight times its chance is at least its row's
    price."""
    max_own_draft_tokens: int = 0
    """As max_draft_tokens, for drafts that the target makes itself: those do not need a draft worker."""
    min_chance: float = 0.0
    """Set by the target for a draft worker: the least joint chance at which it verifies a token. A chain ends below it;
    at 1 nothing is proposed."""

    def for_draft(self, row_price: float) -> Speculation:
        """What a draft worker is told, at this price of a row: not to propose what is likelier to cost than to save."""
        return Speculation(self.max_draft_tokens, min_chance=min(1.0, max(0.0, row_price) / self.weight))

    @property
    def for_own(self) -> Speculation:
        """What a source in this process is told."""
        return Speculation(self.max_own_draft_tokens)

    def within(self, other: Speculation) -> Speculation:
        """With caps that are no higher than the other's."""
        return replace(
            self,
            max_draft_tokens=min(self.max_draft_tokens, other.max_draft_tokens),
            max_own_draft_tokens=min(self.max_own_draft_tokens, other.max_own_draft_tokens),
        )

    def check(self, max_draft_tokens: int) -> None:
        """Raises InvalidRequest. `max_draft_tokens`: those that the target verifies in a step."""
        for name, bound in {"max_draft_tokens": max_draft_tokens, "max_wait_us": MAX_WAIT_US}.items():
            value = getattr(self, name)
            if not 0 <= value <= bound:
                raise InvalidRequest(f"speculation.{name}", f"must be at most {bound}, got {value}")
        # Written so that NaN fails too.
        if not 0 < self.weight <= MAX_WEIGHT:
            raise InvalidRequest("speculation.weight", f"must be above 0 and at most {MAX_WEIGHT:g}")


PLAIN = Speculation()


def price_moved(sent: float, price: float) -> bool:
    """By a quarter since drafts were sent it: they are told, as they stop at tokens that would not be verified."""
    low, high = sorted((max(sent, MIN_CHANCE), max(price, MIN_CHANCE)))
    return high > 1.25 * low


def worthwhile_wait_us(*, cap_us: int, accepted_per_step: float, step_us: float, turnaround_us: float) -> int:
    """Longest useful wait in µs: one step per token expected to be accepted, at most `cap_us`.

    0, no wait, for a draft that takes more than WORTH_A_WAIT of these steps, and while a duration is unknown (0): the
    wait could be long, and a round without it measures both durations.
    """
    saved_us = accepted_per_step * step_us
    if not 0 < turnaround_us <= min(cap_us, WORTH_A_WAIT * saved_us):
        return 0
    return int(min(cap_us, saved_us))
