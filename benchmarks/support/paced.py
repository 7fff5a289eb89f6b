"""A simulated fleet with little CPU cost: real gRPC, answers at fixed times, text as a function of the position.

It loads and times a router: each message is marked when it is sent and found again when it arrives, in one process and
by one clock. Every target steps at a fixed rate and answers for all its sequences in one message. The targets make up
the drafts' proposals; drafts exist only as leases, because a router does not connect to them. A sequence is identified
by its prompt's first token.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from tests.fakes import FakeTarget

VOCAB_SIZE = 65_536
MAX_CONTEXT_LEN = 1 << 20
_WRONG = 0
_RING, _MARGIN = 4096, 64
_TEXT = [1 + i * 7919 % 65_521 for i in range(_RING + _MARGIN)]


def text_at(position: int, count: int) -> list[int]:
    """The tokens of every sequence from `position` on, at most 64. Token 0 is never among them."""
    start = position % _RING
    return _TEXT[start : start + count]


@dataclass(slots=True)
class Marks:
    """Send times of messages until they arrive. Latencies, in seconds, are kept while `recording`."""

    recording: bool = False
    to_client_s: list[float] = field(default_factory=list)
    num_messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By sender and receiver, on both sides of the router."""
    num_steps: int = 0
    num_commits: int = 0
    num_tokens: int = 0
    num_opened: int = 0
    _commits: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def message(self, way: str) -> None:
        if self.recording:
            self.num_messages[way] += 1

    def committed(self, number: int, num_tokens: int, now_s: float) -> None:
        self._commits[number].append(now_s)
        if self.recording:
            self.num_commits += 1
            self.num_tokens += num_tokens

    def opened(self, opening: sequence.OpenSequence) -> None:
        if self.recording:
            self.num_opened += 1

    def received(self, number: int, now_s: float) -> None:
        """The client has received the oldest commit on its way. Raises IndexError when there was none."""
        left_s = self._commits[number].popleft()
        if self.recording:
            self.to_client_s.append(now_s - left_s)


@dataclass(slots=True)
class _Row:
    number: int
    length: int
    end: int
    max_draft_tokens: int
    drafted: bool
    """A draft is assigned to it."""

    @classmethod
    def of(cls, opening: sequence.OpenSequence) -> _Row:
        prompt_len = len(opening.prompt_token_ids)
        return cls(
            number=opening.prompt_token_ids[0],
            length=prompt_len + len(opening.committed_token_ids),
            end=prompt_len + opening.stopping.max_new_tokens,
            max_draft_tokens=opening.speculation.max_draft_tokens,
            drafted=opening.HasField("draft"),
        )


class PacedTarget(FakeTarget):
    """Steps every `step_s`, and later by `row_s` for each row and `prefill_token_s` for each token of a new prompt.
    `accuracy` and `draft_step_s` are of its drafts."""

    def __init__(
        self,
        marks: Marks,
        *,
        step_s: float,
        row_s: float = 0.0,
        prefill_token_s: float = 0.0,
        accuracy: float = 0.0,
        draft_step_s: float = 0.0,
        **info: Any,
    ) -> None:
        super().__init__(step_s=step_s, vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT_LEN, **info)
        self._marks = marks
        self._row_s, self._prefill_token_s = row_s, prefill_token_s
        self._to_read = 0
        """Prompt tokens that the next step prefills."""
        self.load.row_ns = round(row_s * 1e9)
        self.load.prefill_token_ns = round(prefill_token_s * 1e9)
        self._num_right = _lengths(accuracy)
        self._draft_us = int(draft_step_s * 1e6)

    async def Verify(self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any) -> None:  # type: ignore[override]
        rows: dict[int, _Row] = {}
        stepping = asyncio.create_task(self._step_forever(rows, context))
        try:
            async for request in requests:
                self._marks.message("router to target")
                self._take(request, rows)
        finally:
            stepping.cancel()

    def _take(self, request: target_pb2.VerifyRequest, rows: dict[int, _Row]) -> None:
        for opening in request.opens:
            rows[opening.sequence_id] = _Row.of(opening)
            self._to_read += len(opening.prompt_token_ids)
            self._marks.opened(opening)
        for setting in request.settings:
            if row := rows.get(setting.sequence_id):
                row.max_draft_tokens = setting.speculation.max_draft_tokens
        for change in request.set_drafts:
            if row := rows.get(change.sequence_id):
                row.drafted = change.HasField("draft")
        for close in request.closes:
            rows.pop(close.sequence_id, None)

    async def _step_forever(self, rows: dict[int, _Row], context: Any) -> None:
        # Targets of a fleet do not step synchronously.
        next_s = time.monotonic() + random.uniform(0, self.step_s)
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s += self.step_s + len(rows) * self._row_s + self._to_read * self._prefill_token_s
            self._to_read, self.load.num_running = 0, len(rows)
            if rows:
                self._marks.num_steps += self._marks.recording
                self._marks.message("target to router")
                await context.write(self._commits(rows))

    def _commits(self, rows: dict[int, _Row]) -> target_pb2.VerifyResponse:
        reply = target_pb2.VerifyResponse(step_us=int(self.step_s * 1e6), batch_sequences=len(rows))
        now_s = time.monotonic()
        for sequence_id, row in list(rows.items()):
            draft = _guess(self._num_right, row) if row.drafted else []
            draft = draft[: min(row.max_draft_tokens, row.end - row.length - 1)]
            truth = text_at(row.length, len(draft) + 1)
            accepted = _common(draft, truth)
            row.length, base_len = row.length + accepted + 1, row.length
            finished = row.length >= row.end
            reply.commits.add(
                sequence_id=sequence_id,
                base_len=base_len,
                token_ids=truth[: accepted + 1],
                num_drafted=len(draft),
                num_verified=min(len(draft), accepted + 1),
                num_accepted=accepted,
                rejected_token_ids=draft[accepted:],
                finish_reason=sequence.FINISH_REASON_LENGTH if finished else sequence.FINISH_REASON_UNSPECIFIED,
                draft_stats=self._draft_stats(len(draft)) if row.drafted else None,
                share_us=reply.step_us // reply.batch_sequences,
                wasted_us=len(draft) - accepted,
            )
            self._marks.committed(row.number, accepted + 1, now_s)
            if finished:
                del rows[sequence_id]
        return reply

    def _draft_stats(self, num_tokens: int) -> sequence.DraftStats:
        took_us = self._draft_us
        return sequence.DraftStats(
            draft_us=took_us,
            compute_us=took_us,
            source="simulated",
            wire_us=1,
            answer_us=took_us + 1,
            answer_compute_us=took_us,
            answer_tokens=num_tokens,
            share_us=took_us,
            useful_us=took_us // 2,
        )


def _guess(num_right: list[int], row: _Row) -> list[int]:
    """The next tokens of the text, of the row's draft length, with the first mistake after `num_right` tokens."""
    tokens = text_at(row.length, row.max_draft_tokens)
    right = num_right[row.length % _RING]
    if right < len(tokens):
        tokens[right] = _WRONG
    return tokens


def _common(draft: list[int], truth: list[int]) -> int:
    """Leading tokens of `draft` that are right."""
    for i, token in enumerate(draft):
        if token != truth[i]:
            return i
    return len(draft)


def _lengths(accuracy: float) -> list[int]:
    """For each position of the text, the number of right tokens in a draft from there; the same in every run."""
    rng = random.Random(0)
    lengths = []
    for _ in range(_RING):
        right = 0
        while right < _MARGIN and rng.random() < accuracy:
            right += 1
        lengths.append(right)
    return lengths
