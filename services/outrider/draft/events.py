"""Events from outside the draft worker, translated and checked, and its reports before they become messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.drafting.source import Features
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree
from outrider.worker.events import SequenceKey, WorkerEvent, WorkerReport


@dataclass(frozen=True, slots=True)
class DraftCommitted:
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
    limits: Speculation
    received_s: float


DraftEvent = DraftCommitted | Limited
Event = DraftEvent | WorkerEvent


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal. Without tokens it means that the target should not wait."""

    key: SequenceKey
    epoch: int
    tree: DraftTree
    spec: SequenceSpec
    since_s: float
    """Monotonic seconds: when the commit that it answers came in."""
    compute_s: float = 0.0
    """Seconds since then that were spent in the drafter, alone or in a batch."""
    share_s: float = 0.0
    """Its share in seconds of all rounds since its last proposal."""


@dataclass(slots=True, kw_only=True)
class DraftReport(WorkerReport):
    """One round, or the faults found before one."""

    proposals: list[Proposed] = field(default_factory=list)
    removed: list[tuple[SequenceKey, float]] = field(default_factory=list)
    """Sequences that have ended, with their share in seconds of the rounds since their last proposal."""
    round_s: float = 0.0


@dataclass(slots=True)
class DraftStats:
    """Counts since the start. Only the step thread writes them; each is read atomically."""

    busy_s: float = 0.0
    """Seconds in rounds."""
    num_proposals: int = 0
    num_declined: int = 0
    """Proposals without tokens."""
    num_draft_tokens: Counter[str] = field(default_factory=Counter)
    """By source."""
    num_diverged: int = 0
    """Drafts that a commit contradicted."""
    num_unknown: int = 0
    """Messages about sequences that are not open: late, or never opened."""
    num_failed: int = 0
    num_round_failures: int = 0
