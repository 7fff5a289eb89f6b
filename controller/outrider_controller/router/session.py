"""One request: what is committed, and what a worker's commit must be for it to count. Pure.

Knows nothing of workers, streams or clocks: it is told what arrived and when, and answers what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import InvalidRequest
from outrider.protocol import logprobs
from outrider.protocol.limits import (
    MAX_DRAFT_TOKENS,
    MAX_DROPPED_TOKENS,
    MAX_DURATION_US,
    MAX_SOURCE_BYTES,
    MAX_TREE_TOKENS,
)
from outrider.protocol.rounds import RequestStats, Round
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.telemetry.context import NO_CONTEXT, TraceContext

from outrider_controller.router.legs import Legs

_FINISHES = (sequence.FINISH_REASON_STOP, sequence.FINISH_REASON_LENGTH)


class BadReply(Exception):
    """A worker said something that cannot be true. Its message names the field; it never carries token ids."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked RouteRequest: every field in range for the model that will serve it."""

    request_id: str
    tenant: str
    model: str
    prompt: tuple[int, ...]
    resume: tuple[int, ...]
    sampling: sequence.Sampling
    stopping: sequence.Stopping
    seeded: bool
    speculation: router.SpeculationMode.ValueType
    max_draft_tokens: int | None
    cache_salt: bytes
    resume_revision: str = ""
    """What `resume` came from; empty where nobody knows."""
    trace_context: TraceContext = NO_CONTEXT
    logits: sequence.LogitsOptions | None = None
    logprobs: sequence.LogprobsOptions | None = None

    @property
    def finish_reason(self) -> sequence.FinishReason.ValueType:
        """How the tokens resumed from already end the request; unspecified when they do not."""
        if self.resume and self.resume[-1] in self.stopping.stop_token_ids:
            return sequence.FINISH_REASON_STOP
        if len(self.resume) >= self.stopping.max_new_tokens:
            return sequence.FINISH_REASON_LENGTH
        return sequence.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class Session:
    """The truth about one request, which is `committed` and nothing else."""

    request: Request
    mode: sequence.VerificationMode.ValueType
    vocab_size: int
    opened_us: int
    committed: list[int] = field(default_factory=list)
    """Output tokens, resumed ones first."""
    finish_reason: sequence.FinishReason.ValueType = sequence.FINISH_REASON_UNSPECIFIED
    metrics: RequestStats = field(default_factory=RequestStats)
    legs: Legs = field(init=False)
    # Asked for several times a round, so kept and not derived.
    prompt_len: int = field(init=False)
    committed_len: int = field(init=False)
    """Absolute: the prompt is counted."""
    end: int = field(init=False)
    """Absolute, of the last token that may be committed."""

    def __post_init__(self) -> None:
        self.committed = list(self.request.resume)
        self.legs = Legs(self.opened_us)
        self.prompt_len = len(self.request.prompt)
        self.committed_len = self.prompt_len + len(self.committed)
        self.end = self.prompt_len + self.request.stopping.max_new_tokens

    @property
    def remaining(self) -> int:
        return self.end - self.committed_len

    @property
    def finished(self) -> bool:
        return self.finish_reason != sequence.FINISH_REASON_UNSPECIFIED

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.request.prompt, *self.committed)

    def open_message(
        self, sequence_id: int, speculation: sequence.Speculation, draft: sequence.DraftAssignment | None
    ) -> sequence.OpenSequence:
        """Everything another target needs to go on from here."""
        return sequence.OpenSequence(
            sequence_id=sequence_id,
            prompt_token_ids=self.request.prompt,
            committed_token_ids=self.committed,
            sampling=self.request.sampling,
            stopping=self.request.stopping,
            mode=self.mode,
            speculation=speculation,
            cache_salt=self.request.cache_salt,
            logits=self.request.logits,
            logprobs=self.request.logprobs,
            draft=draft,
        )

    def apply(self, commit: sequence.Commit, *, step_us: int, now_us: int) -> Round:
        """Appends what the target committed and returns the round, timed.

        Raises BadReply, changing nothing, when the commit does not continue this request.
        """
        done = Round.from_commit(commit, step_us)
        token_ids = done.token_ids
        self._check(done, token_ids)
        self._check_measures(done)
        self._check_logprobs(commit)
        self.committed += token_ids
        self.committed_len += len(token_ids)
        self.finish_reason = done.finish_reason
        self.legs.commit(done, now_us)
        self.metrics.add(done)
        return done

    def tell(self, done: Round, response: router.RouteResponse) -> None:
        """Fills in an empty message with the last round applied, as the client hears of it."""
        done.fill(response)
        if self.metrics.num_steps == 1:
            response.num_cached_tokens = done.num_cached_tokens
        if done.finish_reason:
            response.metrics.CopyFrom(self.metrics.to_proto())

    def _check(self, done: Round, token_ids: list[int]) -> None:
        num_tokens, num_drafted, num_accepted = len(token_ids), done.num_drafted, done.num_accepted
        if self.finish_reason:
            raise BadReply("commit after the finish")
        if done.base_len != self.committed_len:
            raise BadReply(f"commit.base_len: expected {self.committed_len}, got {done.base_len}")
        if done.finish_reason or not 0 < num_tokens < self.end - self.committed_len:
            self._check_end(num_tokens, done.finish_reason)
        if token_ids and max(token_ids) >= self.vocab_size:
            raise BadReply(f"commit.token_ids: an id is outside the vocabulary of {self.vocab_size}")
        if not num_accepted <= done.num_verified <= num_drafted:
            raise BadReply("commit: num_accepted <= num_verified <= num_drafted does not hold")
        if num_accepted > num_tokens:
            raise BadReply("commit.num_accepted: more than token_ids")
        if rejected := done.rejected:
            if len(rejected) > num_drafted - num_accepted:
                raise BadReply("commit.rejected_token_ids: more than were drafted and not accepted")
            if max(rejected) >= self.vocab_size:
                raise BadReply(f"commit.rejected_token_ids: an id is outside the vocabulary of {self.vocab_size}")

    def _check_measures(self, done: Round) -> None:
        """Numbers that change no text. They are summed over a request, and weighed: none may be what cannot be."""
        if done.num_drafted > MAX_DRAFT_TOKENS:
            raise BadReply(f"commit.num_drafted: {done.num_drafted} where {MAX_DRAFT_TOKENS} are the most")
        if done.num_dropped > MAX_DROPPED_TOKENS:
            raise BadReply(f"commit.num_dropped: {done.num_dropped} in one round")
        if done.num_cached_tokens > self.committed_len:
            raise BadReply("commit.num_cached_tokens: more than there were")
        longest_us = max(done.verify_us, done.queue_us, done.prefill_us, done.draft_queue_us)
        if done.draft_active:
            self._check_draft_stats(done)
            longest_us = max(longest_us, done.draft_us, done.compute_us, done.wire_us, done.answer_us)
            longest_us = max(longest_us, done.answer_compute_us)
        if longest_us > MAX_DURATION_US:
            raise BadReply("commit: a duration is longer than an hour")

    def _check_logprobs(self, commit: sequence.Commit) -> None:
        if self.request.logprobs is None:
            return
        try:
            logprobs.check_commit(commit, self.request.logprobs, self.prompt_len, self.vocab_size)
        except InvalidRequest as error:
            raise BadReply(f"commit.{error.field}: {error.message}") from None

    def _check_draft_stats(self, done: Round) -> None:
        if done.answer_tokens > MAX_TREE_TOKENS:
            raise BadReply(
                f"commit.draft_stats.answer_tokens: {done.answer_tokens} where {MAX_TREE_TOKENS} are the most"
            )
        if len(done.source) > MAX_SOURCE_BYTES:
            raise BadReply(f"commit.draft_stats.source: {len(done.source)} characters")

    def _check_end(self, num_tokens: int, finish: sequence.FinishReason.ValueType) -> None:
        """Of a commit that ends the request, or should."""
        remaining = self.end - self.committed_len
        if finish and finish not in _FINISHES:
            raise BadReply(f"commit.finish_reason: {finish} is not the target's to give")
        if not num_tokens and finish != sequence.FINISH_REASON_LENGTH:
            raise BadReply("commit.token_ids: empty")
        if num_tokens > remaining:
            raise BadReply(f"commit.token_ids: {num_tokens} where {remaining} remained")
        if not finish and num_tokens == remaining:
            raise BadReply("commit.finish_reason: max_new_tokens reached and no finish given")
