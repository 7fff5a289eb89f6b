"""Evidence of a draft for one tenant: sums over rounds, which can be added across routers.

`saved` counts tokens beyond those that the same time gives without the draft: a round that committed three tokens in
the time of two plain ones saved one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

_OWN = " (own drafts)"


def own_drafts_of(model: str) -> str:
    """The target under which the drafts that a model's targets make themselves are planned: those of draft workers are
    decided apart, as both may be verified in one step."""
    return model + _OWN


def model_of(target: str) -> tuple[str, bool]:
    """The model, and whether the target stands for its own drafts."""
    return target.removesuffix(_OWN), target.endswith(_OWN)


class Cell(NamedTuple):
    """A tenant at a target model: the unit of decisions."""

    tenant: str
    target: str
    """A model's name, or `own_drafts_of` one."""


class EvidenceKey(NamedTuple):
    """A cell and a draft. `draft` is a version (model@revision), not a worker: these change. Of own
    drafts it is the kind of source."""

    tenant: str
    target: str
    draft: str

    @property
    def cell(self) -> Cell:
        return Cell(self.tenant, self.target)


@dataclass(slots=True)
class Evidence:
    """Sums over rounds with a draft, or for which one was planned."""

    rounds: float = 0.0
    tokens: float = 0.0
    """Committed."""
    saved: float = 0.0
    """Tokens."""
    saved_squared: float = 0.0
    """Sum of squares of what each round saved."""
    late: float = 0.0
    """Rounds for which no answer of the draft came in time."""
    verified: float = 0.0
    """Draft tokens that were verified."""
    accepted: float = 0.0
    draft_us: float = 0.0
    """Time that the draft took for proposals that were verified."""
    missed: float = 0.0
    """Rounds for which this draft was planned but no worker was found, or the worker has sent nothing yet. They are not
    in `rounds`."""
    requests: float = 0.0
    """Requests that have ended, or have lost this draft. The sums below are over them, all their rounds included."""
    request_tokens: float = 0.0
    request_cost: float = 0.0
    """In plain rounds: the rounds, the price of their drafted rows, and the waits for the draft."""

    @property
    def starved(self) -> float:
        """Share of the rounds planned with this draft for which no proposal came in time."""
        return (self.late + self.missed) / max(self.rounds + self.missed, 1.0)

    def add_rounds(
        self,
        *,
        rounds: int,
        tokens: int,
        saved: float,
        late: int = 0,
        verified: int = 0,
        accepted: int = 0,
        draft_us: int = 0,
    ) -> None:
        """Adds some rounds of one request. `saved`: by all of them together."""
        self.rounds += rounds
        self.tokens += tokens
        self.saved += saved
        # Only the sum is known, so each round is assumed to have saved the mean. That understates the variance.
        self.saved_squared += saved * saved / rounds
        self.late += late
        self.verified += verified
        self.accepted += accepted
        self.draft_us += draft_us

    def took(self, steps: float) -> None:
        """What its rounds took, all together. Without the draft, each step would have given the tokens that are not the
        draft's: the target's own drafts would come too."""
        self.saved -= steps * (self.tokens - self.accepted) / self.rounds
        self.saved_squared = self.saved * self.saved / self.rounds

    def add_request(self, tokens: int, cost: float) -> None:
        self.requests += 1
        self.request_tokens += tokens
        self.request_cost += cost

    def merge(self, other: Evidence) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
