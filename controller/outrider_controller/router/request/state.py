"""One request: its committed tokens, and the conditions that a target's commit must meet. Pure.

Knows nothing of workers, messages or clocks: it applies rounds, and refuses impossible ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.limits import (
    MAX_DRAFT_TOKENS,
    MAX_DROPPED_TOKENS,
    MAX_DURATION_US,
    MAX_SOURCE_BYTES,
    MAX_SOURCES,
    MAX_TREE_TOKENS,
)
from outrider.protocol.rounds import RequestStats, Round
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec


class BadReply(Exception):
    """A worker sent an impossible reply. The message names the field; it never contains token ids."""


@dataclass(slots=True)
class RequestState:
    """The authoritative state of one request: only `committed` counts."""

    spec: SequenceSpec
    vocab_size: int
    committed: list[int] = field(init=False)
    """Output tokens, resumed ones first."""
    finish_reason: int = Finish.NONE
    stats: RequestStats = field(default_factory=RequestStats)
    # Read several times a round, so stored and not derived.
    prompt_len: int = field(init=False)
    committed_len: int = field(init=False)
    """Including the prompt."""
    end: int = field(init=False)
    """Largest `committed_len`, including the prompt."""

    def __post_init__(self) -> None:
        self.committed, self.prompt_len = list(self.spec.committed), len(self.spec.prompt)
        self.committed_len = self.spec.num_tokens
        self.end = self.prompt_len + self.spec.max_new_tokens

    @property
    def remaining(self) -> int:
        return self.end - self.committed_len

    @property
    def finished(self) -> bool:
        return self.finish_reason != Finish.NONE

    def apply(self, done: Round) -> None:
        """Appends what the target committed. Raises BadReply, changing nothing, if it does not continue the request."""
        self._check(done)
        self._check_measures(done)
        self.committed += done.token_ids
        self.committed_len += done.num_tokens
        self.finish_reason = done.finish_reason

    def _check(self, done: Round) -> None:
        num_tokens, num_drafted, num_accepted = done.num_tokens, done.num_drafted, done.num_accepted
        if self.finish_reason:
            raise BadReply("commit after the finish")
        if done.base_len != self.committed_len:
            raise BadReply(f"commit.base_len: expected {self.committed_len}, got {done.base_len}")
        if done.finish_reason or not 0 < num_tokens < self.end - self.committed_len:
            self._check_end(num_tokens, done.finish_reason)
        if num_tokens and max(done.token_ids) >= self.vocab_size:
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
        """Checks numbers that do not change the text. They are summed and decided on, so none may be impossible."""
        if done.num_drafted > MAX_DRAFT_TOKENS:
            raise BadReply(f"commit.num_drafted: {done.num_drafted} where {MAX_DRAFT_TOKENS} are the most")
        if done.num_dropped > MAX_DROPPED_TOKENS:
            raise BadReply(f"commit.num_dropped: {done.num_dropped} in one round")
        if done.num_cached_tokens > self.committed_len:
            raise BadReply("commit.num_cached_tokens: more than there were")
        longest_us = max(done.verify_us, done.queue_us, done.prefill_us)
        if done.draft_active:
            if done.answer_tokens > MAX_TREE_TOKENS:
                most = f"{MAX_TREE_TOKENS} are the most"
                raise BadReply(f"commit.draft_stats.answer_tokens: {done.answer_tokens} where {most}")
            if len(done.source) > MAX_SOURCE_BYTES:
                raise BadReply(f"commit.draft_stats.source: {len(done.source)} characters")
            draft_us = max(done.draft_us, done.compute_us, done.wire_us, done.draft_useful_us)
            longest_us = max(longest_us, draft_us, done.answer_us, done.answer_compute_us)
        self._check_sources(done)
        if longest_us > MAX_DURATION_US:
            raise BadReply("commit: a duration is longer than an hour")

    def _check_sources(self, done: Round) -> None:
        if len(done.sources) > MAX_SOURCES:
            raise BadReply(f"commit.sources: {len(done.sources)} where {MAX_SOURCES} are the most")
        for one in done.sources:
            if len(one.source) > MAX_SOURCE_BYTES:
                raise BadReply(f"commit.sources: a name of {len(one.source)} characters")
            if not one.num_accepted <= one.num_verified <= one.num_drafted <= MAX_TREE_TOKENS:
                raise BadReply("commit.sources: num_accepted <= num_verified <= num_drafted does not hold")
        if sum(one.num_accepted for one in done.sources) > done.num_accepted:
            raise BadReply("commit.sources: more accepted tokens than num_accepted")
        num_told = len(done.token_ids) + len(done.rejected)
        if (places := done.token_sources) and (len(places) > num_told or max(places) >= len(done.sources)):
            raise BadReply("commit.token_sources: no source of a token")
        if len(done.chances) > num_told:
            raise BadReply("commit.chances: no token of a chance")

    def _check_end(self, num_tokens: int, finish: int) -> None:
        """Checks a commit that ends the request, or should."""
        remaining = self.end - self.committed_len
        if finish and finish not in (Finish.STOP, Finish.LENGTH):
            raise BadReply(f"commit.finish_reason: {finish} is not the target's to give")
        if not num_tokens and finish != Finish.LENGTH:
            raise BadReply("commit.token_ids: empty")
        if num_tokens > remaining:
            raise BadReply(f"commit.token_ids: {num_tokens} where {remaining} remained")
        if not finish and num_tokens == remaining:
            raise BadReply("commit.finish_reason: max_new_tokens reached and no finish given")
