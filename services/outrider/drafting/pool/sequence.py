"""One sequence at one draft worker: what the draft is sent, and what its router is sent about the draft's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.drafting.pool.link import DraftLink
from outrider.drafting.pool.log import DraftLog, drafted_us
from outrider.drafting.pool.validator import DraftValidator
from outrider.drafting.source import CloseReason, DraftLimits, Features, SourceOpening
from outrider.drafting.tree import DraftTree
from outrider.errors import InvalidRequest
from outrider.protocol.convert import mode_to_proto, sampling_to_proto
from outrider.protocol.limits import MAX_UINT32, clamp_us
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.v1 import sequence_pb2


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    size: int
    max_context_len: int


@dataclass(slots=True)
class PooledSequence:
    link: DraftLink
    sequence_id: int
    """On the link."""
    opened_len: int
    """Committed length when it was opened there: the answer to that includes the prefill of the prompt."""
    limits: DraftLimits
    """The limits sent last."""
    validator: DraftValidator
    reads_features: bool = False
    """Whether the draft holds a head of which this target computes the features."""
    log: DraftLog = field(default_factory=DraftLog)
    source: str = ""
    """The draft's kind, by its last message."""
    draft_active: bool = False
    """The draft sent something since the last commit. The next three fields: its last answer to a commit."""
    answer_us: int = 0
    answer_compute_us: int = 0
    answer_tokens: int = 0
    shadow: bool = False
    """It only follows, and answers nothing."""
    share_us: int = 0
    """Draft time not yet reported to the router."""

    @classmethod
    def open(
        cls,
        link: DraftLink,
        sequence_id: int,
        key: SequenceKey,
        opening: SourceOpening,
        limits: DraftLimits,
        vocabulary: DraftVocabulary,
        now_us: int,
        *,
        reads_features: bool = False,
    ) -> Self:
        """Opens `key` on the link, with all committed tokens and the current limits.

        Raises InvalidRequest when its id is open there already."""
        if sequence_id in link.keys:
            raise InvalidRequest("draft.sequence_id", "already open")
        committed_len = len(opening.prompt) + len(opening.committed)
        validator = DraftValidator(
            mode=opening.mode,
            sampling=sampling_to_proto(opening.params),
            prompt_len=len(opening.prompt),
            vocab_size=vocabulary.size,
            max_context_len=vocabulary.max_context_len,
            max_positions=limits.max_draft_tokens,
        )
        opened = cls(
            link, sequence_id, committed_len, limits, validator, reads_features=reads_features, shadow=opening.shadow
        )
        # First what may fail: a link names only sequences that are open on it.
        message = open_message(sequence_id, opening, limits)
        link.outbox.last(message.ByteSize()).opens.append(message)
        link.keys[sequence_id] = key
        opened._asked(committed_len, now_us)
        return opened

    def limit(self, limits: DraftLimits) -> None:
        if self.limits != limits:
            self.limits = limits
            self.validator.allow(limits.max_draft_tokens)
            message = sequence_pb2.SetSpeculation(sequence_id=self.sequence_id, speculation=_speculation(limits))
            self.link.outbox.last(message.ByteSize()).settings.append(message)

    def commit(
        self,
        base_len: int,
        token_ids: Sequence[int],
        now_us: int,
        features: Features | None = None,
        in_use: tuple[int, int] = (0, 0),
    ) -> None:
        """Without tokens it sends features alone, to a draft that reads them."""
        shown = features if self.reads_features else None
        if token_ids or shown is not None:
            message = commit_message(self.sequence_id, base_len, token_ids, shown)
            message.num_drafted, message.num_accepted = in_use
            self.link.outbox.last(message.ByteSize()).commits.append(message)
        if token_ids:
            self._asked(base_len + len(token_ids), now_us)

    def close(self, reason: CloseReason) -> SequenceKey:
        key = self.link.closed(self.sequence_id)
        value = sequence_pb2.CloseReason.ValueType(reason.value)
        message = sequence_pb2.CloseSequence(sequence_id=self.sequence_id, reason=value)
        self.link.outbox.last(message.ByteSize()).closes.append(message)
        return key

    def _asked(self, committed_len: int, now_us: int) -> None:
        self.log.asked(committed_len, now_us)
        if self.limits.max_draft_tokens and not self.shadow:
            self.link.asked()

    def take(self, draft: sequence_pb2.Draft, now_us: int) -> DraftTree:
        """The tree of the draft's message, which is numbered and logged. Raises InvalidRequest."""
        self.log.number(draft)
        tree = self.validator.tree(draft)
        answer_us = self.log.add(draft, tree, now_us)
        self.draft_active, self.source = True, tree.source
        if answer_us and tree.base_len != self.opened_len:
            self.answer_us, self.answer_tokens = clamp_us(answer_us), tree.depth
            self.answer_compute_us = clamp_us(draft.compute_us)
        return tree

    def take_stats(
        self, base_len: int, num_drafted: int, serial: int, committed_len: int, useful_s: float
    ) -> sequence_pb2.DraftStats | None:
        """What the router is sent about the draft with a commit, if anything. `serial`: of the last verified token;
        `useful_s`: the draft's time for the accepted ones."""
        if not (self.log.waits or self.draft_active or useful_s):
            return None
        verified = self.log.take_verified(base_len, num_drafted, serial, committed_len)
        if not (verified or self.draft_active or useful_s):
            return None
        draft_us, compute_us, wire_us = drafted_us(verified)
        stats = sequence_pb2.DraftStats(
            draft_us=draft_us,
            compute_us=compute_us,
            wire_us=wire_us,
            source=verified[-1].source if verified else self.source,
            answer_us=self.answer_us,
            answer_compute_us=self.answer_compute_us,
            answer_tokens=self.answer_tokens,
            share_us=clamp_us(self.share_us),
            useful_us=clamp_us(round(useful_s * 1e6)),
        )
        self.draft_active, self.answer_us, self.answer_compute_us, self.answer_tokens = False, 0, 0, 0
        self.share_us = 0
        return stats


def commit_message(
    sequence_id: int, base_len: int, token_ids: Sequence[int], features: Features | None = None
) -> sequence_pb2.Commit:
    message = sequence_pb2.Commit(sequence_id=sequence_id, base_len=base_len, token_ids=token_ids)
    if features is not None:
        message.features, message.features_start = features.rows, features.start
    return message


def open_message(sequence_id: int, opening: SourceOpening, limits: DraftLimits) -> sequence_pb2.OpenSequence:
    """Raises ValueError for a token id that no message can hold."""
    return sequence_pb2.OpenSequence(
        sequence_id=sequence_id,
        prompt_token_ids=opening.prompt,
        committed_token_ids=opening.committed,
        sampling=sampling_to_proto(opening.params),
        stopping=sequence_pb2.Stopping(
            max_new_tokens=opening.max_new_tokens or MAX_UINT32, stop_token_ids=sorted(opening.stop_token_ids)
        ),
        mode=mode_to_proto(opening.mode),
        speculation=_speculation(limits),
        cache_salt=opening.salt,
        request_id=opening.log_fields.get("request_id", ""),
        tenant=opening.log_fields.get("tenant", ""),
        shadow=opening.shadow,
    )


def _speculation(limits: DraftLimits) -> sequence_pb2.Speculation:
    return sequence_pb2.Speculation(max_draft_tokens=limits.max_draft_tokens, min_chance=limits.min_chance)
