"""The name of one sequence in a process that several peers open sequences in, and why a sequence has ended."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class SequenceKey(NamedTuple):
    """A stream and a sequence id: each peer chooses the ids on its own stream."""

    stream: int
    sequence_id: int


class Finish(IntEnum):
    """Values are those of outrider.rpc.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
