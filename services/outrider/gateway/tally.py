"""What one request cost and gained: sums over its rounds, on the gateway's own clock.

The sums are made here and not taken from the last router, because a request may have moved from one router to another,
and one that ends at a stop string never hears the router's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.gateway.output import FinishReason
from outrider.rpc.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Tally:
    """Mutable while the request runs. Times are monotonic seconds."""

    started_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    """Output tokens delivered in this call, after trimming."""
    num_steps: int = 0
    num_spec_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    accepted_by_drafted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Steps by (drafted, accepted)."""
    queue_us_first: int = 0
    queue_us: int = 0
    draft_us: int = 0
    verify_us: int = 0
    round_us: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    num_target_failovers: int = 0
    num_revision_changes: int = 0
    num_draft_failovers: int = 0
    num_router_failovers: int = 0

    def add_round(self, response: router_pb2.RouteResponse) -> None:
        """One round as the router reported it, before anything of it is trimmed."""
        if self.num_steps == 0:
            self.queue_us_first = response.timing.queue_us
            self.num_cached = response.num_cached_tokens
        self.num_steps += 1 if response.token_ids else 0
        self.num_drafted += response.num_drafted
        self.num_verified += response.num_verified
        self.num_accepted += response.num_accepted
        if response.num_drafted:
            self.num_spec_steps += 1
            self.accepted_by_drafted[response.num_drafted, response.num_accepted] += 1
        self.queue_us += response.timing.queue_us
        self.draft_us += response.timing.draft_us
        self.verify_us += response.timing.verify_us
        self.round_us += response.timing.round_us
        if response.HasField("metrics"):
            self._add_final(response.metrics)

    def _add_final(self, metrics: router_pb2.RequestMetrics) -> None:
        if not self.num_router_failovers:
            # After a move the cache may hold a part of the answer too, which is no part of the prompt.
            self.num_cached = max(self.num_cached, metrics.num_cached_tokens)
        self.num_dropped += metrics.num_dropped_draft_tokens
        self.num_target_failovers += metrics.num_target_failovers
        self.num_revision_changes += metrics.num_revision_changes
        self.num_draft_failovers += metrics.num_draft_failovers

    def add_tokens(self, count: int, now_s: float) -> None:
        """Tokens that went out to the client."""
        if count == 0:
            return
        self.num_tokens += count
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s

    def summary(self, now_s: float) -> Summary:
        first = self.first_token_s if self.first_token_s is not None else now_s
        last = self.last_token_s if self.last_token_s is not None else now_s
        generation_s = last - first
        mean_itl_s = generation_s / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0
        total_s = last - self.started_s
        return Summary(
            time_to_first_token_ms=1e3 * (first - self.started_s),
            generation_time_ms=1e3 * generation_s,
            queue_time_ms=self.queue_us_first / 1e3,
            mean_itl_ms=1e3 * mean_itl_s,
            tokens_per_second=self.num_tokens / total_s if total_s > 0 else 0.0,
            speculation=self._speculation(),
        )

    def _speculation(self) -> Speculation:
        return Speculation(
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_drafted,
            num_verified_tokens=self.num_verified,
            num_accepted_draft_tokens=self.num_accepted,
            accepted_by_drafted=tuple(sorted(self.accepted_by_drafted.items())),
            num_steps=self.num_steps,
            num_cached_tokens=self.num_cached,
            num_dropped_draft_tokens=self.num_dropped,
            num_target_failovers=self.num_target_failovers,
            num_revision_changes=self.num_revision_changes,
            num_draft_failovers=self.num_draft_failovers,
            num_router_failovers=self.num_router_failovers,
            queue_us=self.queue_us,
            draft_us=self.draft_us,
            verify_us=self.verify_us,
            round_us=self.round_us,
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """Sums over one request, and the rates that follow from them."""

    num_spec_steps: int
    """Steps with at least one drafted token."""
    num_draft_tokens: int
    num_verified_tokens: int
    num_accepted_draft_tokens: int
    accepted_by_drafted: tuple[tuple[tuple[int, int], int], ...]
    """((drafted, accepted), steps), sorted."""
    num_steps: int
    num_cached_tokens: int
    num_dropped_draft_tokens: int
    num_target_failovers: int
    num_revision_changes: int
    num_draft_failovers: int
    num_router_failovers: int
    queue_us: int
    draft_us: int
    verify_us: int
    round_us: int

    @property
    def num_spec_tokens(self) -> int:
        """Most tokens drafted in one step."""
        return max((drafted for (drafted, _), _ in self.accepted_by_drafted), default=0)

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
        for (_, accepted), steps in self.accepted_by_drafted:
            histogram[accepted] += steps
        return dict(sorted(histogram.items()))

    @property
    def acceptance_histogram_by_draft_length(self) -> dict[int, dict[int, int]]:
        by_length: dict[int, dict[int, int]] = {}
        for (drafted, accepted), steps in self.accepted_by_drafted:
            by_length.setdefault(drafted, {})[accepted] = steps
        return by_length


@dataclass(frozen=True, slots=True)
class Summary:
    """Durations from the gateway's monotonic clock."""

    time_to_first_token_ms: float
    generation_time_ms: float
    """First token to last."""
    queue_time_ms: float
    """As the target reported it for the first step: standing ready before it ran."""
    mean_itl_ms: float
    """Per token, not per message: tokens of one round arrive together."""
    tokens_per_second: float
    """Over the whole request, the wait for the first token included."""
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended."""

    reason: FinishReason
    usage: Usage
    summary: Summary
