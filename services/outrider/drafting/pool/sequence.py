"""One sequence at one draft worker: what the draft is sent, and what its router is sent about the draft's work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.drafting.pool.link import DraftLink
from outrider.drafting.pool.validator import DraftValidator, DraftVocabulary
from outrider.drafting.source import CloseReason, Features
from outrider.errors import InvalidRequest
from outrider.limits import clamp_us
from outrider.protocol.sequences import opening_for_draft, speculation_to_proto
from outrider.rpc.v1 import sequence_pb2
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.tree import DraftTree

# Drafts not yet verified that are remembered. Between two commits a draft should never send more.
_MAX_SENT = 256


@dataclass(slots=True, eq=False)
class _Sent:
    tree: DraftTree
    end: int
    draft_us: int
    compute_us: int
    wire_us: int
    """Network time: of the commit to the draft worker and of the draft back."""


@dataclass(slots=True)
class DraftLog:
    """Drafts that wait for verification: which of them a round verified, and what their drafting took. One for each
    opening of a sequence at a draft. Pure."""

    _serial: int = 0
    _asked: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=8))
    """Committed length and time of the last openings and commits sent; a draft answers the one at its base_len."""
    _sent: list[_Sent] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return bool(self._sent)

    def asked(self, committed_len: int, now_us: int) -> None:
        """The draft was sent the tokens below `committed_len`, in an opening or a commit."""
        self._asked.append((committed_len, now_us))

    def number(self, draft: sequence_pb2.Draft) -> None:
        """Numbers the draft 1, 2, …; a commit refers to it by this number."""
        self._serial += 1
        draft.serial = self._serial

    def add(self, draft: sequence_pb2.Draft, tree: DraftTree, now_us: int) -> int:
        """Remembers a numbered draft for the round that will verify it.

        Returns how many µs ago the commit that it answers was sent; 0 if it answers none, or that is forgotten.
        """
        answer_us = self._since_asked_us(tree.base_len, now_us)
        if tree.token_ids:
            wire_us = max(0, answer_us - draft.draft_us)
            end = tree.base_len + tree.depth
            del self._sent[: -_MAX_SENT + 1]
            self._sent.append(_Sent(tree, end, draft.draft_us, draft.compute_us, wire_us))
        return answer_us

    def take_verified(self, base_len: int, num_drafted: int, serial: int, committed_len: int) -> list[_Sent]:
        """The messages that brought the drafted tokens of a round, in order. `serial`: number of the last of them.

        A draft is charged to the first round that verified a part of it. Drafts that the commit has passed are
        forgotten.
        """
        verified = self._verified(base_len, base_len + num_drafted, serial) if num_drafted else []
        self._sent = [sent for sent in self._sent if sent.end > committed_len and sent not in verified]
        return verified

    def _since_asked_us(self, base_len: int, now_us: int) -> int:
        for committed_len, asked_us in reversed(self._asked):
            if committed_len == base_len:
                return now_us - asked_us
        return 0

    def _verified(self, base_len: int, end: int, serial: int) -> list[_Sent]:
        overlapping = [sent for sent in self._sent if sent.tree.base_len < end and sent.end > base_len]
        if len(overlapping) == 1 and overlapping[0].tree.serial == serial:
            return overlapping
        last = next((sent for sent in self._sent if sent.tree.serial == serial), None)
        if last is None:
            return overlapping
        return [sent for sent in overlapping if sent.tree.serial <= serial and sent.tree.epoch == last.tree.epoch]


def drafted_us(verified: Sequence[_Sent]) -> tuple[int, int, int]:
    """Total draft time, the compute part of it, and the network time of the last answer, in µs. Each fits a message."""
    draft_us = compute_us = wire_us = 0
    for sent in verified:
        draft_us += sent.draft_us
        compute_us += sent.compute_us
        wire_us = sent.wire_us or wire_us
    return clamp_us(draft_us), clamp_us(compute_us), clamp_us(wire_us)


@dataclass(slots=True)
class PooledSequence:
    link: DraftLink
    sequence_id: int
    """On the link."""
    opened_len: int
    """Committed length when it was opened there: the answer to that includes the prefill of the prompt."""
    limits: Speculation
    """The limits sent last."""
    validator: DraftValidator
    reads_features: bool = False
    """Whether the draft holds a head of which this target computes the features."""
    begun: bool = False
    """Whether it was sent any. Those of a step that ran before the draft was paired would leave out all before them."""
    log: DraftLog = field(default_factory=DraftLog)
    source: str = ""
    """The draft's kind, by its last message."""
    draft_active: bool = False
    """The draft sent something since the last commit. The next three fields: its last answer to a commit."""
    answer_us: int = 0
    answer_compute_us: int = 0
    answer_tokens: int = 0
    share_us: int = 0
    """Draft time not yet reported to the router."""

    @classmethod
    def open(
        cls,
        link: DraftLink,
        sequence_id: int,
        key: SequenceKey,
        spec: SequenceSpec,
        committed: Sequence[int],
        limits: Speculation,
        vocabulary: DraftVocabulary,
        now_us: int,
        *,
        reads_features: bool = False,
    ) -> Self:
        """Opens `key` on the link, with all committed tokens and the current limits.

        Raises InvalidRequest when its id is open there already."""
        if sequence_id in link.keys:
            raise InvalidRequest("draft.sequence_id", "already open")
        committed_len = len(spec.prompt) + len(committed)
        validator = DraftValidator(spec, vocabulary, limits.max_draft_tokens)
        opened = cls(link, sequence_id, committed_len, limits, validator, reads_features=reads_features)
        # First what may fail: a link names only sequences that are open on it.
        message = opening_for_draft(spec, sequence_id, committed, limits)
        link.outbox.last(message.ByteSize()).opens.append(message)
        link.keys[sequence_id] = key
        link.wants(sequence_id, drafts=bool(limits.max_draft_tokens))
        opened._asked(committed_len, now_us)
        return opened

    def limit(self, limits: Speculation) -> None:
        if self.limits != limits:
            self.limits = limits
            self.link.wants(self.sequence_id, drafts=bool(limits.max_draft_tokens))
            self.validator.allow(limits.max_draft_tokens)
            message = sequence_pb2.SetSpeculation(
                sequence_id=self.sequence_id, speculation=speculation_to_proto(limits)
            )
            self.link.outbox.last(message.ByteSize()).settings.append(message)

    def show(self, base_len: int, features: Features) -> None:
        """Before the commit at base_len that gives the token after them."""
        self.begun |= features.first
        if self.reads_features and self.begun:
            self._put(commit_message(self.sequence_id, base_len, (), features))

    def commit(self, base_len: int, token_ids: Sequence[int], now_us: int) -> None:
        if token_ids:
            self._put(commit_message(self.sequence_id, base_len, token_ids))
            self._asked(base_len + len(token_ids), now_us)

    def _put(self, message: sequence_pb2.Commit) -> None:
        self.link.outbox.last(message.ByteSize()).commits.append(message)

    def close(self, reason: CloseReason) -> SequenceKey:
        key = self.link.closed(self.sequence_id)
        value = sequence_pb2.CloseReason.ValueType(reason.value)
        message = sequence_pb2.CloseSequence(sequence_id=self.sequence_id, reason=value)
        self.link.outbox.last(message.ByteSize()).closes.append(message)
        return key

    def _asked(self, committed_len: int, now_us: int) -> None:
        self.log.asked(committed_len, now_us)
        if self.limits.max_draft_tokens:
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
            source=verified[-1].tree.source if verified else self.source,
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
        message.feature_bits = features.bits if features.bits != 16 else 0
    return message
