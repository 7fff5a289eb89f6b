"""What the worker has to say after a step, before it becomes messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.options.logprobs import TokenLogprobs
from outrider.target.commit import Outcome
from outrider.target.times import Times
from outrider.worker.events import SequenceKey
from outrider.worker.report import Failed, WorkerReport


@dataclass(frozen=True, slots=True)
class Committed:
    key: SequenceKey
    base_len: int
    """Length before this commit."""
    outcome: Outcome
    rejected: list[int]
    """Drafted tokens of the step after as many as were accepted, one beside them included."""
    num_dropped: int
    draft_serial: int
    """Of the message that brought the last drafted token; 0 without one."""
    times: Times
    num_prompt_tokens: int
    """Of the opening; 0 after its first commit."""
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache; 0 after the first commit."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One per token of the outcome, where they are asked for."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_siblings: int = 0
    """Tokens verified beside drafted ones."""
    draft_useful_s: float = 0.0
    """What the accepted tokens took their draft."""


@dataclass(slots=True, kw_only=True)
class Report(WorkerReport):
    """One step, or what was found before one."""

    commits: list[Committed] = field(default_factory=list)
    refused_drafts: list[Failed] = field(default_factory=list)
    removed: list[tuple[SequenceKey, Times]] = field(default_factory=list)
    """Sequences that have ended, with what they took since their last commit."""
    step_us: int = 0
    batch_sequences: int = 0
    batch_tokens: int = 0
    row_price: float = 0.0
    """Of one more row in a step, as a chance."""
    best_chance: float = 0.0
    """Of the likeliest first token that drafts propose; 0 while unknown."""


@dataclass(slots=True)
class TargetStats:
    """Counts since the start. Written by the step thread alone; each is read at once."""

    num_steps: int = 0
    busy_s: float = 0.0
    """In steps."""
    wasted_s: float = 0.0
    """Of that, rows of drafted tokens that were not accepted."""
    num_preemptions: int = 0
    num_step_failures: int = 0
    num_unknown: int = 0
    """Messages about sequences that are not open: late, or never opened."""
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_dropped_tokens: int = 0
    num_siblings: int = 0
    """Tokens judged beside a guess. Not among the drafted ones."""
    num_siblings_accepted: int = 0
    """Of those; among the accepted ones."""
    num_refused_drafts: int = 0
    num_unleased_drafts: int = 0
    """Drafts that routers named and no lease does. Written by the event loop alone."""
    num_committed_tokens: int = 0
