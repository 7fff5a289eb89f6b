"""How long this request's drafts are worth judging, by what became of them at each position. Pure.

A draft ends a proposal itself where it is unsure, token by token, which no average knows better. This is for what it
says without being sure, or sure in vain: a position at which hardly anything was ever accepted is not asked for. Kept
by source, and the longest counts: long quotations are not to be cut off by what single guesses earned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Forgetting per judged draft of a source. What is not asked for any more is forgotten too, and then tried again.
_KEEP = 0.99
# Evidence of so many drafts, half of them right, before there is any.
_PRIOR_JUDGED, _PRIOR_ACCEPTED = 4.0, 2.0
# What judging a position costs, in steps. Drafting it comes on top, and is measured.
_JUDGING_STEPS = 0.04
# Names come from drafts: one that makes up a new one every time must not fill the memory.
_MOST_SOURCES = 8


@dataclass(slots=True)
class _Position:
    judged: float = 0.0
    accepted: float = 0.0

    @property
    def acceptance(self) -> float:
        return (_PRIOR_ACCEPTED + self.accepted) / (_PRIOR_JUDGED + self.judged)


@dataclass(slots=True)
class Lengths:
    """Of one request."""

    _sources: dict[str, list[_Position]] = field(default_factory=dict)

    def judged(self, source: str, *, num_verified: int, num_accepted: int) -> None:
        """One draft: its first `num_verified` positions were judged, the first `num_accepted` of them accepted."""
        if source not in self._sources and len(self._sources) >= _MOST_SOURCES:
            source = next(iter(self._sources))
        positions = self._sources.setdefault(source, [])
        for position in positions:
            position.judged *= _KEEP
            position.accepted *= _KEEP
        while len(positions) < num_verified:
            positions.append(_Position())
        for number, position in enumerate(positions[:num_verified]):
            position.judged += 1
            position.accepted += number < num_accepted

    def limit(self, most: int, drafting_steps: float = 0.0) -> int:
        """Positions worth asking for: at least 1, for whether any is belongs to `worth`, and at most `most`.

        An accepted one saves a step; `drafting_steps` is what drafting one takes, in steps. Positions that do not bring
        that in even where all before them were accepted are not worth it.
        """
        least = _JUDGING_STEPS + drafting_steps
        return max((_worthwhile(positions, most, least) for positions in self._sources.values()), default=most)


def _worthwhile(positions: list[_Position], most: int, least: float) -> int:
    for number, position in enumerate(positions[:most]):
        if position.acceptance < least:
            return max(number, 1)
    return most
