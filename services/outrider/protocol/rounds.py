"""The record of one round, and the sums over a request's rounds. Router and gateway share both. Pure.

Reading a field of a message costs more than reading one of an object, and reading a list ten times as much. A round is
read in many places, so each field is copied from the message once, here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace


@dataclass(slots=True)
class Round:
    """What one engine step committed for one sequence, and where the time went. Durations are in microseconds."""

    base_len: int
    token_ids: list[int]
    rejected: list[int]
    num_tokens: int
    """Length of token_ids, which a trace may leave out."""
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_dropped: int
    num_cached_tokens: int
    finish_reason: sequence.FinishReason.ValueType
    queue_us: int
    wait_us: int
    """The part of queue_us in which it was held back for a draft."""
    prefill_us: int
    verify_us: int
    """Duration of the engine step."""
    round_us: int = 0
    """From the previous commit to this one."""
    draft_us: int = 0
    compute_us: int = 0
    wire_us: int = 0
    source: str = ""
    """The kind of source that proposed the first of the drafted tokens; without any, the draft worker's."""
    draft_active: bool = False
    """The draft sent something since the previous round, or was verified in this one."""
    answer_us: int = 0
    """The draft's last answer to a commit: from sending the commit to receiving the answer. 0 without one."""
    answer_compute_us: int = 0
    answer_tokens: int = 0
    at_us: int = 0
    """From the request's arrival to this commit's. This and the following fields are set when a trace is kept."""
    max_draft_tokens: int = 0
    max_wait_us: int = 0
    batch_sequences: int = 0
    draft_useful_us: int = 0
    """Draft time spent, in this round or before, on the accepted tokens."""
    sources: Sequence[SourceTokens] = ()
    """What came of the drafted tokens, by source; empty without any."""
    token_sources: Sequence[int] = ()
    """For each accepted token, then for each rejected one, the place of its source in `sources`; empty with one."""
    chances: bytes = b""
    """For the same tokens, the chance that the source gave each, in 255ths."""
    batch_tokens: int = 0
    """Set when a trace is kept."""

    @classmethod
    def from_commit(cls, commit: sequence.Commit, step_us: int) -> Round:
        token_ids, queue_us, wait_us = commit.token_ids[:], commit.queue_us, commit.wait_us
        # Positional: keyword arguments would double the cost.
        done = cls(
            commit.base_len,
            token_ids,
            commit.rejected_token_ids[:],
            len(token_ids),
            commit.num_drafted,
            commit.num_verified,
            commit.num_accepted,
            commit.num_dropped,
            commit.num_cached_tokens,
            commit.finish_reason,
            queue_us,
            wait_us if wait_us < queue_us else queue_us,
            commit.prefill_us,
            step_us,
        )
        if commit.HasField("draft_stats"):
            stats = commit.draft_stats
            done.draft_us, done.compute_us, done.wire_us = stats.draft_us, stats.compute_us, stats.wire_us
            done.source = stats.source
            done.draft_active = True
            done.draft_useful_us = stats.useful_us
            if answer_us := stats.answer_us:
                done.answer_us, done.answer_compute_us = answer_us, stats.answer_compute_us
                done.answer_tokens = stats.answer_tokens
        if done.num_drafted:
            done._take_sources(commit)
            done.chances = commit.chances
        return done

    def _take_sources(self, commit: sequence.Commit) -> None:
        if sources := commit.sources:
            self.sources, self.token_sources = sources_from_proto(sources), commit.token_sources[:]
            self.source = self.sources[0].source
        else:
            self.sources = (SourceTokens(self.source, False, self.num_drafted, self.num_verified, self.num_accepted),)

    @classmethod
    def from_response(cls, response: router.RouteResponse) -> Round:
        """The round as a gateway receives it: `base_len` and the fields that only a router knows are 0."""
        timing, token_ids = response.timing, response.token_ids[:]
        return cls(
            0,
            token_ids,
            [],
            len(token_ids),
            response.num_drafted,
            response.num_verified,
            response.num_accepted,
            0,
            response.num_cached_tokens,
            response.finish_reason,
            timing.queue_us,
            timing.wait_us,
            timing.prefill_us,
            timing.verify_us,
            timing.round_us,
            timing.draft_us,
            timing.compute_us,
            timing.wire_us,
        )

    def fill(self, response: router.RouteResponse) -> None:
        """Writes the client's view of the round into an empty message. Zeros are not written: writing one costs as
        much."""
        response.token_ids.extend(self.token_ids)
        if self.num_drafted:
            response.num_drafted = self.num_drafted
            response.num_verified = self.num_verified
            response.num_accepted = self.num_accepted
        if self.finish_reason:
            response.finish_reason = self.finish_reason
        self._fill_timing(response.timing)

    def to_trace(self) -> trace.RoundTrace:
        message = trace.RoundTrace(
            at_us=self.at_us,
            base_len=self.base_len,
            token_ids=self.token_ids,
            rejected_token_ids=self.rejected,
            num_tokens=self.num_tokens,
            num_drafted=self.num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            num_dropped=self.num_dropped,
            max_draft_tokens=self.max_draft_tokens,
            max_wait_us=self.max_wait_us,
            batch_sequences=self.batch_sequences,
            batch_tokens=self.batch_tokens,
            chances=self.chances,
            answer_us=self.answer_us,
            answer_compute_us=self.answer_compute_us,
            answer_tokens=self.answer_tokens,
            source=self.source,
            sources=sources_to_proto(self.sources),
            token_sources=self.token_sources,
        )
        self._fill_timing(message.timing)
        return message

    def _fill_timing(self, timing: router.RoundTiming) -> None:
        timing.round_us = self.round_us
        timing.verify_us = self.verify_us
        if self.queue_us:
            timing.queue_us = self.queue_us
            timing.wait_us = self.wait_us
        if self.prefill_us:
            timing.prefill_us = self.prefill_us
        if self.draft_us:
            timing.draft_us = self.draft_us
        if self.compute_us:
            timing.compute_us = self.compute_us
        if self.wire_us:
            timing.wire_us = self.wire_us


@dataclass(slots=True)
class RequestStats:
    """Sums over the rounds of one request or of many. Field names are those of RequestMetrics."""

    num_spec_steps: int = 0
    """Steps with at least one drafted token."""
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_dropped_draft_tokens: int = 0
    num_target_failovers: int = 0
    num_draft_failovers: int = 0
    num_revision_changes: int = 0
    num_on_as_auto: int = 0
    """Requests whose `speculation: on` counted as auto, by their tenant's policy."""
    queue_us: int = 0
    draft_us: int = 0
    verify_us: int = 0
    round_us: int = 0
    accepted_by_drafted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Steps by (drafted, accepted)."""

    def add(self, done: Round) -> None:
        if self.num_steps == 0:
            self.num_cached_tokens = done.num_cached_tokens
        self.num_steps += 1
        self.num_dropped_draft_tokens += done.num_dropped
        self.queue_us += done.queue_us
        self.draft_us += done.draft_us
        self.verify_us += done.verify_us
        self.round_us += done.round_us
        num_drafted = done.num_drafted
        if not num_drafted:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_verified_tokens += done.num_verified
        self.num_accepted_draft_tokens += done.num_accepted
        self.accepted_by_drafted[num_drafted, done.num_accepted] += 1

    def to_proto(self) -> router.RequestMetrics:
        histogram = self.acceptance_histogram
        return router.RequestMetrics(
            acceptance_histogram=[histogram.get(i, 0) for i in range(max(histogram, default=-1) + 1)],
            **{name: getattr(self, name) for name in _SUMS},
        )

    @property
    def num_spec_tokens(self) -> int:
        """Most tokens drafted in one step."""
        return max((drafted for drafted, _ in self.accepted_by_drafted), default=0)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, the target's own included: 1 when nothing was accepted."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Speculative steps by the number of accepted tokens; sparse."""
        histogram: Counter[int] = Counter()
        for (_, accepted), steps in self.accepted_by_drafted.items():
            histogram[accepted] += steps
        return dict(sorted(histogram.items()))

    @property
    def acceptance_histogram_by_draft_length(self) -> dict[int, dict[int, int]]:
        by_length: dict[int, dict[int, int]] = {}
        for (drafted, accepted), steps in sorted(self.accepted_by_drafted.items()):
            by_length.setdefault(drafted, {})[accepted] = steps
        return by_length


_SUMS = tuple(each.name for each in fields(RequestStats) if each.name != "accepted_by_drafted")


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


def sources_to_proto(counts: Iterable[SourceTokens]) -> list[sequence.SourceTokens]:
    return [sequence.SourceTokens(**one._asdict()) for one in counts]


def sources_from_proto(messages: Iterable[sequence.SourceTokens]) -> tuple[SourceTokens, ...]:
    return tuple(
        SourceTokens(one.source, one.own, one.num_drafted, one.num_verified, one.num_accepted, one.draft_us)
        for one in messages
    )
