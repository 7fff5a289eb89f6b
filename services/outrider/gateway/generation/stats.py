"""Statistics of one request: sums over its rounds, on the gateway's own clock.

The gateway computes the sums itself, because a request may have moved between routers, and one that ends at a stop
string never receives the router's sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.generation.output import FinishReason
from outrider.protocol.rounds import RequestStats, Round
from outrider.rpc.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0
    """Tokens of the client's prediction that the answer has in their places; next, those that it does not have."""
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of completion_tokens that are reasoning, if known."""


@dataclass(slots=True)
class RunningStats:
    """Mutable while the request runs. Times are monotonic seconds."""

    started_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    """Output tokens delivered in this call, after trimming."""
    submitted_s: float = 0.0
    """When the request was submitted to the first router."""
    opened_s: float | None = None
    """When the target that gave the first token received the request, if a router reported it."""
    queue_us_first: int = 0
    num_router_failovers: int = 0
    revisions: list[tuple[str, int]] = field(default_factory=list)
    """Model revisions that produced the answer so far, as reported by routers, with the output tokens before each."""
    draft_kinds: set[str] = field(default_factory=set)
    sums: RequestStats = field(default_factory=RequestStats)

    def opened(self, now_s: float) -> None:
        """To be called when a target has received the request."""
        if self.sums.num_steps == 0:
            self.opened_s = now_s

    def generated_by(self, revision: str, num_before: int) -> None:
        """`revision`: of the next token, after `num_before` of the output; empty for that of the token before."""
        if not revision or (self.revisions and self.revisions[-1][0] == revision):
            return
        if self.revisions and self.revisions[-1][1] == num_before:
            # It generated no token.
            self.revisions.pop()
        self.revisions.append((revision, num_before))

    def add_round(self, response: router_pb2.RouteResponse) -> None:
        """Adds one round as the router reported it, before the answer's end trims it."""
        self.draft_kinds.update(response.draft_kinds)
        if response.token_ids:
            if self.sums.num_steps == 0:
                self.queue_us_first = response.timing.queue_us
            self.sums.add(Round.from_response(response))
        if response.HasField("metrics"):
            self._add_final(response.metrics)

    def _add_final(self, metrics: router_pb2.RequestMetrics) -> None:
        """Adds what only the router knows."""
        if not self.num_router_failovers:
            # After a move the prefix cache may also hold a part of the answer, which does not count.
            self.sums.num_cached_tokens = max(self.sums.num_cached_tokens, metrics.num_cached_tokens)
        self.sums.num_dropped_draft_tokens += metrics.num_dropped_draft_tokens
        self.sums.num_target_failovers += metrics.num_target_failovers
        self.sums.num_draft_failovers += metrics.num_draft_failovers
        self.sums.num_revision_changes += metrics.num_revision_changes
        # A maximum, because every router of the request may report it.
        self.sums.num_on_as_auto = max(self.sums.num_on_as_auto, metrics.num_on_as_auto)

    def add_tokens(self, count: int, now_s: float) -> None:
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
        routing_s = self.opened_s - self.submitted_s if self.opened_s is not None else 0.0
        return Summary(
            time_to_first_token_ms=1e3 * (first - self.started_s),
            generation_time_ms=1e3 * generation_s,
            queue_time_ms=1e3 * routing_s + self.queue_us_first / 1e3,
            mean_itl_ms=1e3 * mean_itl_s,
            tokens_per_second=self.num_tokens / total_s if total_s > 0 else 0.0,
            sums=self.sums,
            num_router_failovers=self.num_router_failovers,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Durations from the gateway's monotonic clock."""

    time_to_first_token_ms: float
    generation_time_ms: float
    """From the first token to the last."""
    queue_time_ms: float
    """Until a target received the request, with the wait for a place, plus the time for which the request was ready
    there before its first step, as the target reported it."""
    mean_itl_ms: float
    """Per token, not per message: tokens of one round arrive together."""
    tokens_per_second: float
    """Over the whole request, with the wait for the first token."""
    sums: RequestStats
    num_router_failovers: int


@dataclass(frozen=True, slots=True)
class AnswerFinish:
    reason: FinishReason
    usage: Usage
    summary: Summary
    matched_stop: int | str | None = None
    receipt: str = ""
    """Signed, if requested."""
