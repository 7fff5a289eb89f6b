"""What rounds have shown of one pairing: sums that any router can add up, and that add up across routers.

One currency: `saved`, in plain rounds. A round that committed three tokens in the time of two plain ones saved one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

MAX_POSITIONS = 16
"""Positions of a guess that are counted apart. Those beyond count with the last."""


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
    """Sums over rounds that a draft took part in."""

    rounds: float = 0.0
    tokens: float = 0.0
    """Committed."""
    saved: float = 0.0
    saved_squared: float = 0.0
    """Sum of squares of what each round saved."""
    late: float = 0.0
    """Rounds for which no draft came in time."""
    verified: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    """Drafted tokens judged, by position in the guess."""
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)

    def add_rounds(self, *, rounds: int, tokens: int, saved: float, late: int = 0) -> None:
        """Some rounds of one request, and what they saved together."""
        self.rounds += rounds
        self.tokens += tokens
        self.saved += saved
        # Of rounds that are only known together, each is taken to have saved as much. That understates their variance.
        self.saved_squared += saved * saved / rounds
        self.late += late

    def add_verdict(self, num_verified: int, num_accepted: int) -> None:
        """One round's judged tokens: the first num_accepted of num_verified."""
        for position in range(num_verified):
            self.verified[min(position, MAX_POSITIONS - 1)] += 1
            self.accepted[min(position, MAX_POSITIONS - 1)] += position < num_accepted

    def merge(self, other: Evidence) -> None:
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, list):
                mine[:] = [a + b for a, b in zip(mine, more, strict=True)]
            else:
                setattr(self, each.name, mine + more)


class EvidenceLog:
    """What one router has seen since it last told."""

    def __init__(self) -> None:
        self._seen: dict[Pairing, Evidence] = {}

    def of(self, pairing: Pairing) -> Evidence:
        return self._seen.setdefault(pairing, Evidence())

    def take(self) -> dict[Pairing, Evidence]:
        """Only pairings with rounds since the last call."""
        seen, self._seen = self._seen, {}
        return {pairing: evidence for pairing, evidence in seen.items() if evidence.rounds}
