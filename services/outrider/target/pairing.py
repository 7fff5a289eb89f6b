"""One sequence at one draft: what the draft is sent, and what its router is sent about the draft's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.errors import InvalidRequest
from outrider.protocol.draft_log import DraftLog, clamp_us, drafted_us
from outrider.protocol.validate import DraftValidator
from outrider.rpc.v1 import sequence_pb2
from outrider.target.draft_link import DraftLink
from outrider.target.opening import Limits
from outrider.target.report import Committed
from outrider.worker.events import SequenceKey


@dataclass(slots=True)
class Pairing:
    link: DraftLink
    sequence_id: int
    """On the link."""
    opened_len: int
    """Committed length when it was opened there: the answer to that includes the prefill of the prompt."""
    sent_settings: tuple[int, int, float]
    """The settings sent to the draft last."""
    validator: DraftValidator
    log: DraftLog = field(default_factory=DraftLog)
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
        opening: sequence_pb2.OpenSequence,
        limits: Limits,
        now_us: int,
    ) -> Self:
        """Opens `key` on the link, with all committed tokens and the current settings.

        Raises InvalidRequest when its id is open there already."""
        if sequence_id in link.keys:
            raise InvalidRequest("draft.sequence_id", "already open")
        committed_len = len(opening.prompt_token_ids) + len(opening.committed_token_ids)
        validator = DraftValidator(
            mode=opening.mode,
            sampling=opening.sampling,
            prompt_len=len(opening.prompt_token_ids),
            vocab_size=limits.vocab_size,
            max_context_len=limits.max_context_len,
            max_draft_tokens=_max_positions(opening.speculation),
        )
        pairing = cls(link, sequence_id, committed_len, _draft_settings(opening.speculation), validator)
        link.keys[sequence_id] = key
        sent = sequence_pb2.OpenSequence()
        sent.CopyFrom(opening)
        sent.sequence_id = sequence_id
        for name in ("draft", "logits", "logprobs"):
            sent.ClearField(name)
        link.outbox.open(sent)
        pairing._asked(committed_len, now_us)
        return pairing

    def set(self, speculation: sequence_pb2.Speculation) -> None:
        """Sends the settings if those that concern a draft have changed."""
        if self.sent_settings != (settings := _draft_settings(speculation)):
            self.sent_settings = settings
            self.validator.allow(_max_positions(speculation))
            self.link.outbox.set(sequence_pb2.SetSpeculation(sequence_id=self.sequence_id, speculation=speculation))

    def commit(self, base_len: int, token_ids: Sequence[int], now_us: int) -> None:
        self.link.outbox.commit(
            sequence_pb2.Commit(sequence_id=self.sequence_id, base_len=base_len, token_ids=token_ids)
        )
        self._asked(base_len + len(token_ids), now_us)

    def close(self, reason: sequence_pb2.CloseReason.ValueType) -> SequenceKey:
        key = self.link.closed(self.sequence_id)
        self.link.outbox.close(sequence_pb2.CloseSequence(sequence_id=self.sequence_id, reason=reason))
        return key

    def _asked(self, committed_len: int, now_us: int) -> None:
        self.log.asked(committed_len, now_us)
        if self.sent_settings[0]:
            self.link.asked()

    def offered(self, draft: sequence_pb2.Draft, num_positions: int, now_us: int) -> None:
        answer_us = self.log.add(draft, draft.base_len, num_positions, now_us)
        self.draft_active = True
        if answer_us and draft.base_len != self.opened_len:
            self.answer_us, self.answer_tokens = clamp_us(answer_us), num_positions
            self.answer_compute_us = clamp_us(draft.compute_us)

    def take_stats(self, committed: Committed) -> sequence_pb2.DraftStats | None:
        """What the router is sent about the draft with this commit, if anything."""
        if not (self.log.waits or self.draft_active or committed.draft_useful_s):
            return None
        base_len, outcome = committed.base_len, committed.outcome
        verified = self.log.take_verified(
            *(base_len, outcome.num_drafted, committed.draft_serial, base_len + len(outcome.token_ids))
        )
        if not (verified or self.draft_active or committed.draft_useful_s):
            return None
        draft_us, compute_us, wire_us = drafted_us(verified)
        stats = sequence_pb2.DraftStats(
            draft_us=draft_us,
            compute_us=compute_us,
            wire_us=wire_us,
            source=verified[-1].source if verified else "",
            answer_us=self.answer_us,
            answer_compute_us=self.answer_compute_us,
            answer_tokens=self.answer_tokens,
            share_us=clamp_us(self.share_us),
            useful_us=clamp_us(round(committed.draft_useful_s * 1e6)),
        )
        self.draft_active, self.answer_us, self.answer_compute_us, self.answer_tokens = False, 0, 0, 0
        self.share_us = 0
        return stats


def _draft_settings(speculation: sequence_pb2.Speculation) -> tuple[int, int, float]:
    """The settings that concern a draft."""
    return speculation.max_draft_tokens, speculation.run_ahead_tokens, speculation.min_chance


def _max_positions(speculation: sequence_pb2.Speculation) -> int:
    """Positions that one message of a draft may cover."""
    return speculation.max_draft_tokens + speculation.run_ahead_tokens if speculation.max_draft_tokens else 0
