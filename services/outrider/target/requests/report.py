"""What the worker reports after a step, before it becomes messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.source import KINDS, Features
from outrider.options.logprobs import TokenLogprobs
from outrider.protocol.rounds import SourceTokens
from outrider.target.requests.by_source import chances_of, places_of
from outrider.target.requests.commit import Outcome
from outrider.target.requests.times import Times
from outrider.tree import DraftTree
from outrider.worker.events import Failed, SequenceKey, WorkerReport


# Nobody changes one. It is not frozen, because that takes three times as long.
@dataclass(slots=True)
class Committed:
    """What a step committed to one sequence. What follows from it is found by who asks, and not by the step thread."""

    key: SequenceKey
    base_len: int
    """Length before this commit."""
    outcome: Outcome
    draft: DraftTree
    """The drafted tokens in the step."""
    accepted: Sequence[int]
    """The nodes of those that were accepted."""
    num_dropped: int
    times: Times
    num_prompt_tokens: int
    """Prompt tokens of the opening; 0 after its first commit."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache; 0 after the first commit."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One per token of the outcome, when requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    sources: Sequence[SourceTokens] = ()
    """What came of the drafted tokens in the step, by source."""
    features: Features | None = None
    """For a head on draft workers: of the last token before the commit, and of the accepted ones."""
    top: Sequence[TokenLogprobs] = ()
    """For samples: one per token of the outcome, as computed."""

    @property
    def rejected(self) -> list[int]:
        """The drafted tokens of the longest path in the step, after as many as were accepted."""
        return [self.draft.token_ids[node] for node in self.draft.longest()[len(self.accepted) :]]

    @property
    def draft_serial(self) -> int:
        """Number of the message that brought the last drafted token; 0 without one."""
        return self.draft.last_serial

    @property
    def num_branch_tokens(self) -> int:
        """Draft tokens in the step beyond those of the longest path."""
        return len(self.draft) - self.draft.depth

    @property
    def draft_useful_s(self) -> float:
        """Draft time spent on the accepted tokens."""
        return sum(map(self.draft.seconds_of, self.accepted))

    @property
    def token_sources(self) -> list[int]:
        """For each accepted token, then for each rejected one: the place of its source in `sources`."""
        return places_of(self.draft, self.accepted)

    @property
    def chances(self) -> bytes:
        """For the same tokens: the chance that the source gave each, in 255ths."""
        return chances_of(self.draft, self.accepted)


@dataclass(slots=True, kw_only=True)
class TargetReport(WorkerReport):
    """One step, or only what was found before one."""

    commits: list[Committed] = field(default_factory=list)
    features: list[tuple[SequenceKey, int, Features]] = field(default_factory=list)
    """For heads on draft workers: of parts of prompts, with the committed length; to be sent before the commits."""
    refused_drafts: list[Failed] = field(default_factory=list)
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
    num_unleased_drafts: int = 0
    """Drafts that routers named and that hold no lease. Only the event loop writes it."""
    num_committed_tokens: int = 0
    num_source_failures: int = 0
    """Calls of such a source that raised an error."""
    sources: dict[str, SourceStats] = field(default_factory=lambda: {name: SourceStats() for name in KINDS})
    """By name: the kinds of this process, and the first few that draft workers name."""

    def of_source(self, name: str) -> SourceStats:
        name = name or _OTHER
        if (found := self.sources.get(name)) is not None:
            return found
        return self.sources.setdefault(name if len(self.sources) < _MAX_SOURCES else _OTHER, SourceStats())
