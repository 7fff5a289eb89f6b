"""What one request has cost so far. Plain numbers: they are counted every round, and become a message once."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.rpc.v1 import router_pb2 as router

from outrider_controller.router.round import Round


@dataclass(slots=True)
class Sums:
    """The fields of RequestMetrics."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry i: steps in which exactly i drafted tokens were accepted."""
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_dropped_draft_tokens: int = 0
    num_target_failovers: int = 0
    num_revision_changes: int = 0
    num_draft_failovers: int = 0
    queue_us: int = 0
    draft_us: int = 0
    verify_us: int = 0
    round_us: int = 0

    def add(self, done: Round) -> None:
        """One round. Steps without drafted tokens are no speculation steps."""
        if self.num_steps == 0:
            self.num_cached_tokens = done.num_cached_tokens
        self.num_steps += 1
        self.num_dropped_draft_tokens += done.num_dropped
        self.queue_us += done.queue_us
        self.verify_us += done.verify_us
        self.round_us += done.round_us
        num_drafted = done.num_drafted
        if not num_drafted:
            return
        num_accepted = done.num_accepted
        self.draft_us += done.draft_us
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_verified_tokens += done.num_verified
        self.num_accepted_draft_tokens += num_accepted
        histogram = self.acceptance_histogram
        while len(histogram) <= num_accepted:
            histogram.append(0)
        histogram[num_accepted] += 1

    def message(self) -> router.RequestMetrics:
        return router.RequestMetrics(
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_verified_tokens=self.num_verified_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            acceptance_histogram=self.acceptance_histogram,
            num_steps=self.num_steps,
            num_cached_tokens=self.num_cached_tokens,
            num_dropped_draft_tokens=self.num_dropped_draft_tokens,
            num_target_failovers=self.num_target_failovers,
            num_revision_changes=self.num_revision_changes,
            num_draft_failovers=self.num_draft_failovers,
            queue_us=self.queue_us,
            draft_us=self.draft_us,
            verify_us=self.verify_us,
            round_us=self.round_us,
        )
