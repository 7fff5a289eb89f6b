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


# Where weights are brought back to size: far below what a float holds.
_LARGE = 1e9


@dataclass(slots=True)
class _Positions:
    """Of one source. Instead of fading what was seen, each draft weighs more than the one before."""

    weight: float = 1.0
    """Of the last draft."""
    judged: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def draft(self, num_verified: int, num_accepted: int) -> None:
        self.weight = weight = self.weight / _KEEP
        judged, accepted = self.judged, self.accepted
        while len(judged) < num_verified:
            judged.append(0.0)
            accepted.append(0.0)
        for number in range(num_verified):
            judged[number] += weight
        for number in range(min(num_accepted, num_verified)):
            accepted[number] += weight
        if weight > _LARGE:
            self.weight = 1.0
            self.judged = [value / weight for value in judged]
            self.accepted = [value / weight for value in accepted]

    def worthwhile(self, most: int, least: float) -> int:
        """Positions whose acceptance is at least so much, where they were judged."""
        prior_judged, prior_accepted = _PRIOR_JUDGED * self.weight, _PRIOR_ACCEPTED * self.weight
        for number, judged in enumerate(self.judged[:most]):
            if prior_accepted + self.accepted[number] < least * (prior_judged + judged):
                return max(number, 1)
        return most


@dataclass(slots=True)
class Lengths:
    """Of one request."""

    _sources: dict[str, _Positions] = field(default_factory=dict)

    def judged(self, source: str, *, num_verified: int, num_accepted: int) -> None:
        """One draft: its first `num_verified` positions were judged, the first `num_accepted` of them accepted."""
        positions = self._sources.get(source)
        if positions is None:
            if len(self._sources) >= _MOST_SOURCES:
                source = next(iter(self._sources))
            positions = self._sources.setdefault(source, _Positions())
        positions.draft(num_verified, num_accepted)

    def limit(self, most: int, drafting_steps: float = 0.0) -> int:
        """Positions worth asking for: at least 1, for whether any is belongs to `worth`, and at most `most`.

        An accepted one saves a step; `drafting_steps` is what drafting one takes, in steps. Positions that do not bring
        that in even where all before them were accepted are not worth it.
        """
        least = _JUDGING_STEPS + drafting_steps
        return max((positions.worthwhile(most, least) for positions in self._sources.values()), default=most)
