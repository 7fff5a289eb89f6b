"""One round: what a target's commit says and where its time went. Pure.

A field of a message costs more to read than one of an object, a list in it ten times as much, and a round is looked at
by many: so each field is read once, here.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence


@dataclass(slots=True)
class Round:
    """The fields of Commit and, once the session has taken it, of RoundTiming."""

    base_len: int
    token_ids: list[int]
    rejected: list[int]
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_dropped: int
    num_cached_tokens: int
    finish_reason: sequence.FinishReason.ValueType
    queue_us: int
    wait_us: int
    prefill_us: int
    draft_serial: int
    draft_queue_us: int
    verify_us: int
    """Of the engine step."""
    round_us: int = 0
    draft_us: int = 0
    compute_us: int = 0
    wire_us: int = 0
    source: str = ""
    """Which part of the drafter proposed what was judged."""
    drafting: sequence.Drafting | None = None
    """What the target saw of a draft that it talks to itself."""

    @classmethod
    def of(cls, commit: sequence.Commit, step_us: int) -> Round:
        queue_us = commit.queue_us
        # By position: names would cost as much as the rest.
        done = cls(
            commit.base_len,
            commit.token_ids[:],
            commit.rejected_token_ids[:],
            commit.num_drafted,
            commit.num_verified,
            commit.num_accepted,
            commit.num_dropped,
            commit.num_cached_tokens,
            commit.finish_reason,
            queue_us,
            min(commit.wait_us, queue_us),
            commit.prefill_us,
            commit.draft_serial,
            commit.draft_queue_us,
            step_us,
        )
        if commit.HasField("drafting"):
            done.drafting = drafting = commit.drafting
            done.draft_us, done.compute_us, done.wire_us = drafting.draft_us, drafting.compute_us, drafting.wire_us
            done.source = drafting.source
        return done

    @property
    def committed_len(self) -> int:
        """After it."""
        return self.base_len + len(self.token_ids)

    def fill(self, response: router.RouteResponse) -> None:
        """Writes what the client hears of it into an empty message. What is 0 is left out: it costs as much."""
        response.token_ids.extend(self.token_ids)
        if self.num_drafted:
            response.num_drafted = self.num_drafted
            response.num_verified = self.num_verified
            response.num_accepted = self.num_accepted
        if self.finish_reason:
            response.finish_reason = self.finish_reason
        timing = response.timing
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
