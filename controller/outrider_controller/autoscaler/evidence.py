"""What rounds have shown of one pairing: sums that any router can add up, and that add up across routers.

One currency: `saved`, in plain rounds. A round that committed three tokens in the time of two plain ones saved one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple


class Cell(NamedTuple):
    """What a decision is made for."""

    tenant: str
    target: str
    """A model's name."""


class Pairing(NamedTuple):
    """What evidence is about. `draft` names a version (model@revision), never a worker: workers come and go."""

    tenant: str
    target: str
    draft: str

    @property
    def cell(self) -> Cell:
        return Cell(self.tenant, self.target)


@dataclass(slots=True)
class Evidence:
    """Sums over rounds that a draft took part in, or should have."""

    rounds: float = 0.0
    tokens: float = 0.0
    """Committed."""
    saved: float = 0.0
    saved_squared: float = 0.0
    """Sum of squares of what each round saved."""
    late: float = 0.0
    """Rounds for which no draft came in time."""
    verified: float = 0.0
    """Drafted tokens."""
    accepted: float = 0.0
    draft_us: float = 0.0
    """What drafting took the draft, as far as it was verified."""
    missed: float = 0.0
    """Rounds that it was meant for and had no worker for. They are not among `rounds`."""

    @property
    def starved(self) -> float:
        """Share of the rounds that it was meant for, to which no draft came in time."""
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
        """Some rounds of one request, and what they saved together."""
        self.rounds += rounds
        self.tokens += tokens
        self.saved += saved
        # Of rounds that are only known together, each is taken to have saved as much. That understates their variance.
        self.saved_squared += saved * saved / rounds
        self.late += late
        self.verified += verified
        self.accepted += accepted
        self.draft_us += draft_us

    def merge(self, other: Evidence) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
