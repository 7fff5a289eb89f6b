"""Where a draft should run, in the target's process or on a draft worker: reckoned from what was measured. Pure.

A draft on a worker takes nothing of the target's device, and comes later. It is reckoned as if each step waited for the
drafts of all sequences. With several streams the scheduler that ships does not, and does better, as `whatif` shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.comparison.step_line import StepLine


@dataclass(frozen=True, slots=True)
class Link:
    """Between a target and its draft workers."""

    round_trip_s: float = 1e-3
    bytes_per_s: float = 1.25e9
    slower: float = 1.0
    """How many times as long a draft takes on a worker's device as on that where it was measured."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of some streams, with drafts made where the target is."""

    streams: int
    tokens: float
    """That each sequence commits in a round."""
    drafted: float
    """Rows of each beside its own."""
    draft_s: float
    """In which the drafts of all are made."""


@dataclass(frozen=True, slots=True)
class Placeable:
    """A head or a model, perhaps together with lookups."""

    name: str
    feature_bytes: int
    """Of a token, as they are sent to a head on a worker; 0: a model, which reads none and has no place at a target."""
    rounds: tuple[Rounds, ...]
    """By the number of streams, ascending."""


@dataclass(frozen=True, slots=True)
class MeasuredDrafts:
    """All that a table of places is reckoned from."""

    line: StepLine
    between_s: dict[int, float]
    """Of a plain step apart from its forward, by the number of streams."""
    drafts: tuple[Placeable, ...]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> MeasuredDrafts:
        """Of its `asdict` after JSON. Raises KeyError, TypeError, ValueError."""
        line, drafts = found["line"], found["drafts"]
        decoding = {int(count): tuple((x, y) for x, y in points) for count, points in line["decoding"].items()}
        return cls(
            StepLine(**{**line, "decoding": decoding}),
            {int(streams): float(seconds) for streams, seconds in found["between_s"].items()},
            tuple(Placeable(**{**one, "rounds": tuple(Rounds(**each) for each in one["rounds"])}) for one in drafts),
        )


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """What it would bring to have a draft there, with some streams."""

    name: str
    """Empty: plain decoding."""
    on_worker: bool
    streams: int
    tokens_per_s: float
    card_s: float
    """Of the target's device, for a token."""
    freed: float = 0.0
    """Share of the device's time for a token of plain decoding."""
    best: bool = False
    """Whether nothing brings more tokens per second."""


def places(measured: MeasuredDrafts, link: Link) -> list[DraftPlace]:
    """By the number of streams, plain decoding first."""
    return [place for streams in measured.between_s for place in _with(measured, link, streams)]


def _with(measured: MeasuredDrafts, link: Link, streams: int) -> list[DraftPlace]:
    def step_s(sequences: float, drafted: float) -> float:
        return measured.line.seconds(sequences, sequences * (1 + drafted), 0) + measured.between_s[streams]

    plain_s = step_s(streams, 0.0)
    found = [DraftPlace("", False, streams, streams / plain_s, plain_s / streams)]
    for draft in measured.drafts:
        [rounds] = (each for each in draft.rounds if each.streams == streams)
        tokens = streams * rounds.tokens
        if draft.feature_bytes:
            round_s = step_s(streams, rounds.drafted) + rounds.draft_s
            found.append(DraftPlace(draft.name, False, streams, tokens / round_s, round_s / tokens))
        busy_s = step_s(streams, rounds.drafted)
        sent_s = draft.feature_bytes * tokens / link.bytes_per_s
        round_s = busy_s + link.round_trip_s + sent_s + link.slower * rounds.draft_s
        found.append(DraftPlace(draft.name, True, streams, tokens / round_s, busy_s / tokens))
    most = max(place.tokens_per_s for place in found)
    return [
        replace(place, freed=1 - place.card_s / found[0].card_s, best=place.tokens_per_s == most) for place in found
    ]
