"""What the worker reports after a step, before it becomes messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.drafting.source import KINDS, Features
from outrider.protocol.rounds import SourceTokens
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Times
from outrider.worker.events import SequenceKey, WorkerReport


@dataclass(slots=True, kw_only=True)
class TargetReport(WorkerReport):
    """One step, or only what was found before one."""

    commits: list[StepRow[Any]] = field(default_factory=list)
    features: list[tuple[SequenceKey, int, Features]] = field(default_factory=list)
    """For heads on draft workers, with the length before the step's commit; to be sent before the commits."""
    removed: list[tuple[SequenceKey, Times]] = field(default_factory=list)
    """Sequences that have ended, with their times since the last commit."""
    step_us: int = 0
    batch_sequences: int = 0
    batch_tokens: int = 0
    row_price: float = 0.0
    """Price of one more row in a step, as a chance."""
    best_chance: float = 0.0
    """Chance of the likeliest first token that drafts propose; 0 while unknown."""


@dataclass(slots=True)
class SourceStats:
    """What came of one source's drafts."""

    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    row_s: float = 0.0
    """Time of their rows in steps."""
    draft_s: float = 0.0
    """Time that the source spent on those in steps; of one in this process, all its time."""

    def add(self, counted: SourceTokens) -> None:
        self.num_drafted += counted.num_drafted
        self.num_verified += counted.num_verified
        self.num_accepted += counted.num_accepted


# Draft workers choose the names of their sources, and a label's values use memory for ever.
_MAX_SOURCES = 16
_OTHER = "other"


@dataclass(slots=True)
class TargetStats:
    """Counts since the start. Only the step thread writes them; each is read atomically."""

    num_steps: int = 0
    busy_s: float = 0.0
    """Seconds in steps."""
    wasted_s: float = 0.0
    """The part of that spent on drafted tokens that were not accepted."""
    num_preemptions: int = 0
    num_step_failures: int = 0
    num_unknown: int = 0
    """Messages about sequences that are not open: late, or never opened."""
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_dropped_tokens: int = 0
    num_branch_tokens: int = 0
    """Draft tokens in steps beyond those of one path; not counted among the drafted tokens."""
    num_branch_tokens_accepted: int = 0
    """Those accepted beside the main guess; counted among the accepted tokens too."""
    num_refused_drafts: int = 0
    """Malformed ones. Only the event loop writes this and the next."""
    num_unleased_drafts: int = 0
    """Drafts that routers named and that hold no lease."""
    num_committed_tokens: int = 0
    num_source_failures: int = 0
    """Calls of such a source that raised an error."""
    num_dropped_samples: int = 0
    sources: dict[str, SourceStats] = field(default_factory=lambda: {name: SourceStats() for name in KINDS})
    """By name: the kinds of this process, and the first few that draft workers name."""

    def of_source(self, name: str) -> SourceStats:
        name = name or _OTHER
        if (found := self.sources.get(name)) is not None:
            return found
        return self.sources.setdefault(name if len(self.sources) < _MAX_SOURCES else _OTHER, SourceStats())
