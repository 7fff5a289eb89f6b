"""Events from outside the draft worker, already translated and checked."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.source import DraftLimits, Features, Opening
from outrider.worker.events import SequenceKey, WorkerEvent


@dataclass(frozen=True, slots=True)
class Opened:
    key: SequenceKey
    opening: Opening
    received_s: float
    """Monotonic."""


@dataclass(frozen=True, slots=True)
class Committed:
    key: SequenceKey
    base_len: int
    """Length before this commit."""
    token_ids: tuple[int, ...]
    finished: bool
    """The sequence has ended; only its close follows."""
    received_s: float
    features: Features | None = None


@dataclass(frozen=True, slots=True)
class Limited:
    key: SequenceKey
    limits: DraftLimits
    received_s: float


DraftEvent = Opened | Committed | Limited
Event = DraftEvent | WorkerEvent
