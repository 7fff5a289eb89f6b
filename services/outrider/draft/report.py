"""What the worker has to say after a round, before it becomes messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.drafters import Drafted
from outrider.speculation import SamplingParams, VerificationMode
from outrider.worker.events import SequenceKey
from outrider.worker.report import WorkerReport


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal and where it belongs. Without tokens it says: nothing this time, do not wait."""

    key: SequenceKey
    epoch: int
    base_len: int
    drafted: Drafted
    params: SamplingParams
    mode: VerificationMode
    since_s: float
    """Monotonic: when the commit came in that it answers; of a guess made unasked, when its making began."""
    compute_s: float = 0.0
    """Of the time since then, in the drafter, alone or in a batch."""
    share_s: float = 0.0
    """Its part of all rounds since it was last spoken of."""
    run_ahead: bool = False
    """Made unasked, while what it continues is being judged."""


@dataclass(slots=True, kw_only=True)
class Report(WorkerReport):
    """One round, or the faults found before one."""

    proposals: list[Proposed] = field(default_factory=list)
    removed: list[tuple[SequenceKey, float]] = field(default_factory=list)
    """Sequences that have ended, with their part of the rounds since they were last spoken of."""
    round_s: float = 0.0
    """How long the round took."""


@dataclass(slots=True)
class DraftStats:
    """Counts since the start. Written by the step thread alone; each is read at once."""

    busy_s: float = 0.0
    """In rounds, those ahead included."""
    num_proposals: int = 0
    num_declined: int = 0
    """Proposals without tokens."""
    num_draft_tokens: Counter[str] = field(default_factory=Counter)
    """By source."""
    num_diverged: int = 0
    """Guesses that a commit contradicted."""
    num_unknown: int = 0
    """Messages about sequences that are not open: late, or never opened."""
    num_failed: int = 0
    num_round_failures: int = 0
