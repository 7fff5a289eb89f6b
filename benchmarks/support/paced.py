"""A fleet that costs next to nothing: real gRPC, answers at fixed times, a text that is a function of the position.

Made to load a router, and to time it: whatever passes through is marked where it leaves and found again where it
arrives, in one process and by one clock. Every target steps at a fixed rate, takes what drafts it has by then, and
answers for all its sequences in one message; every draft answers so for all commits since its last step. A target that
is to talk to a draft itself makes its guesses up: the router hears nothing of them either way. A sequence is known by
its prompt's first token.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from outrider.rpc.v1 import draft_pb2, target_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.testing.workers import SimulatedDraft, SimulatedTarget

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
    """When things left, until they arrive. Latencies, in seconds, are kept while `recording`."""

    recording: bool = False
    to_client_s: list[float] = field(default_factory=list)
    to_target_s: list[float] = field(default_factory=list)
    num_messages: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By who wrote to whom, of both ends of the router."""
    num_steps: int = 0
    num_commits: int = 0
    num_tokens: int = 0
    _commits: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _drafts: dict[int, deque[tuple[int, float]]] = field(default_factory=lambda: defaultdict(deque))

    def message(self, way: str) -> None:
        if self.recording:
            self.num_messages[way] += 1

    def committed(self, number: int, num_tokens: int, now_s: float) -> None:
        self._commits[number].append(now_s)
        if self.recording:
            self.num_commits += 1
            self.num_tokens += num_tokens

    def received(self, number: int, now_s: float) -> None:
        """The client has the oldest commit that was under way. Raises IndexError when there was none."""
        left_s = self._commits[number].popleft()
        if self.recording:
            self.to_client_s.append(now_s - left_s)

    def drafted(self, number: int, base_len: int, now_s: float) -> None:
        self._drafts[number].append((base_len, now_s))

    def offered(self, number: int, base_len: int, now_s: float) -> None:
        """The target has a draft. Those that left before it will not come: their sequence had ended."""
        under_way = self._drafts[number]
        while under_way:
            left_len, left_s = under_way.popleft()
            if left_len == base_len:
                if self.recording:
                    self.to_target_s.append(now_s - left_s)
                return


@dataclass(slots=True)
class _Row:
    number: int
    length: int
    end: int
    max_draft_tokens: int
    draft_base: int = 0
    draft: list[int] = field(default_factory=list)
    paired: bool = False

    @classmethod
    def of(cls, opening: sequence.OpenSequence) -> _Row:
        prompt_len = len(opening.prompt_token_ids)
        return cls(
            number=opening.prompt_token_ids[0],
            length=prompt_len + len(opening.committed_token_ids),
            end=prompt_len + opening.stopping.max_new_tokens,
            max_draft_tokens=opening.speculation.max_draft_tokens,
        )


class PacedTarget(SimulatedTarget):
    """Steps every `step_s`, waits for nothing. `accuracy` and `draft_step_s` are of the drafts that it talks to."""

    def __init__(
        self, marks: Marks, *, step_s: float, accuracy: float = 0.0, draft_step_s: float = 0.0, **info: Any
    ) -> None:
        super().__init__(step_s=step_s, vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT_LEN, **info)
        self._marks = marks
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
        now_s = time.monotonic()
        for opening in request.opens:
            rows[opening.sequence_id] = _Row.of(opening)
        for draft in request.drafts:
            if row := rows.get(draft.sequence_id):
                row.draft_base, row.draft = draft.base_len, list(draft.token_ids)
                self._marks.offered(row.number, row.draft_base, now_s)
        for setting in request.settings:
            if row := rows.get(setting.sequence_id):
                row.max_draft_tokens = setting.speculation.max_draft_tokens
        for pair in request.pairs:
            if row := rows.get(pair.sequence_id):
                row.paired = bool(pair.draft_address)
        for close in request.closes:
            rows.pop(close.sequence_id, None)

    async def _step_forever(self, rows: dict[int, _Row], context: Any) -> None:
        # Targets of a fleet do not step in time with one another.
        next_s = time.monotonic() + random.uniform(0, self.step_s)
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            next_s += self.step_s
            if rows:
                self._marks.num_steps += self._marks.recording
                self._marks.message("target to router")
                await context.write(self._commits(rows))

    def _commits(self, rows: dict[int, _Row]) -> target_pb2.VerifyResponse:
        reply = target_pb2.VerifyResponse(step_us=int(self.step_s * 1e6), batch_sequences=len(rows))
        now_s = time.monotonic()
        for sequence_id, row in list(rows.items()):
            if row.paired:
                row.draft_base, row.draft = row.length, _guess(self._num_right, row)
            draft = row.draft[row.length - row.draft_base :] if row.draft_base <= row.length else []
            draft = draft[: min(row.max_draft_tokens, row.end - row.length - 1)]
            truth = text_at(row.length, len(draft) + 1)
            accepted = _common(draft, truth)
            row.length, base_len = row.length + accepted + 1, row.length
            row.draft = []
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
                drafting=self._drafting(len(draft)) if row.paired else None,
            )
            self._marks.committed(row.number, accepted + 1, now_s)
            if finished:
                del rows[sequence_id]
        return reply

    def _drafting(self, num_tokens: int) -> sequence.Drafting:
        took_us = self._draft_us
        return sequence.Drafting(
            draft_us=took_us,
            compute_us=took_us,
            source="simulated",
            wire_us=1,
            answer_us=took_us + 1,
            answer_compute_us=took_us,
            answer_tokens=num_tokens,
        )


class PacedDraft(SimulatedDraft):
    """Answers every commit at its next step, of `step_s`; each token is right with probability `accuracy`."""

    def __init__(self, marks: Marks, *, step_s: float, accuracy: float, **info: Any) -> None:
        super().__init__(accuracy=accuracy, vocab_size=VOCAB_SIZE, max_context_len=MAX_CONTEXT_LEN, **info)
        self._step_s = step_s
        self._marks = marks
        self._num_right = _lengths(accuracy)

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        rows: dict[int, _Row] = {}
        due: dict[int, _Row] = {}
        stepping = asyncio.create_task(self._step_forever(due, context))
        try:
            async for request in requests:
                self._marks.message("router to draft")
                self._take(request, rows, due)
        finally:
            stepping.cancel()

    def _take(self, request: draft_pb2.DraftRequest, rows: dict[int, _Row], due: dict[int, _Row]) -> None:
        for opening in request.opens:
            rows[opening.sequence_id] = due[opening.sequence_id] = _Row.of(opening)
        for commit in request.commits:
            if row := rows.get(commit.sequence_id):
                row.length = commit.base_len + len(commit.token_ids)
                due[commit.sequence_id] = row
        for close in request.closes:
            rows.pop(close.sequence_id, None)
            due.pop(close.sequence_id, None)

    async def _step_forever(self, due: dict[int, _Row], context: Any) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            if due:
                self._marks.message("draft to router")
                await context.write(self._drafts(due))

    def _drafts(self, due: dict[int, _Row]) -> draft_pb2.DraftResponse:
        reply = draft_pb2.DraftResponse()
        now_s = time.monotonic()
        for sequence_id, row in due.items():
            tokens = _guess(self._num_right, row)
            reply.drafts.add(
                sequence_id=sequence_id,
                base_len=row.length,
                token_ids=tokens,
                confidence=[self.accuracy] * len(tokens),
                source="simulated",
                draft_us=int(self._step_s * 1e6),
            )
            self._marks.drafted(row.number, row.length, now_s)
        due.clear()
        return reply


def _guess(num_right: list[int], row: _Row) -> list[int]:
    """What follows, as far as it is asked for, with the first mistake where `num_right` puts it."""
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
    """For each position of the text, how many tokens are guessed right from there on: the same in every run."""
    rng = random.Random(0)
    lengths = []
    for _ in range(_RING):
        right = 0
        while right < _MARGIN and rng.random() < accuracy:
            right += 1
        lengths.append(right)
    return lengths
