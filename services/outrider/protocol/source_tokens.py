"""What a step did with the drafted tokens of one source. Target and router share it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.rpc.v1 import sequence_pb2 as sequence


class SourceTokens(NamedTuple):
    """A token that several sources propose counts for the one that gives it the greatest chance."""

    source: str
    own: bool
    """The target made the draft itself, without a draft worker."""
    num_drafted: int
    """Tokens in the step, all branches of a tree included; each has a row of its own."""
    num_verified: int
    num_accepted: int
    draft_us: int = 0
    """Of an own source: time that it spent on these drafts."""


def to_proto(counts: Iterable[SourceTokens]) -> list[sequence.SourceTokens]:
    return [sequence.SourceTokens(**one._asdict()) for one in counts]


def from_proto(messages: Iterable[sequence.SourceTokens]) -> tuple[SourceTokens, ...]:
    return tuple(
        SourceTokens(one.source, one.own, one.num_drafted, one.num_verified, one.num_accepted, one.draft_us)
        for one in messages
    )
