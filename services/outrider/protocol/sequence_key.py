"""The name of one sequence in a process that several peers open sequences in."""

from __future__ import annotations

from typing import NamedTuple


class SequenceKey(NamedTuple):
    """A stream and a sequence id: each peer chooses the ids on its own stream."""

    stream: int
    sequence_id: int
