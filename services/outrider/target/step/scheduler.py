"""Plans the next step. Pure: sequences, free blocks and the clock in, a plan out. How many drafted tokens of
each sequence are verified, `take_drafts` decides.

Every step mixes decoding, verification and chunks of prefill. A sequence waits for its draft only while none is ready
for a step. Decoding goes first, one token per sequence. A quarter of the step is kept for prefill while there is any.
Draft tokens fill what decoding leaves, the most valuable of all sequences first, as far as each is worth its row;
prefill gets the rest. Decoding may preempt the newest sequence, which is recomputed later; drafts never preempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.target.drafts.choice import Pricing, StepRoom, blocks_for, take_drafts
from outrider.target.requests.row import StepRow
from outrider.target.step.sequence import TargetSequence

_MAX_PROMPT_LOGPROBS = 256
"""Most tokens of prompts in one step whose log probabilities are asked for: all their logits, [tokens, vocab], are held
at once."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The size of a step."""

    block_size: int
    """Tokens in one KV block."""
    max_batch_tokens: int = 512
    prefill_share: float = 0.25
    """Share of max_batch_tokens that drafts leave to prefill while there is any."""
    max_branch_tokens: int = 8
    """Most tokens of one draft that are verified beyond those of one path."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_batch_tokens < 1:
            raise ValueError("max_batch_tokens: must be at least 1")
        if not 0 <= self.prefill_share <= 1:
            raise ValueError(f"prefill_share: {self.prefill_share} is not in [0, 1]")
        if self.max_branch_tokens < 0:
            raise ValueError("max_branch_tokens: must not be negative")


TargetRow = StepRow[TargetSequence]


def _row(sequence: TargetSequence, num_tokens: int) -> TargetRow:
    spec, start, base_len = sequence.spec, sequence.cached_len, sequence.committed_len
    decides = start + num_tokens == base_len
    return StepRow(
        params=spec.params,
        mode=spec.mode,
        processor=sequence.processor,
        num_top=spec.num_top,
        sequence=sequence,
        key=sequence.key,
        base_len=base_len,
        start=start,
        num_tokens=num_tokens,
        decides=decides,
        decodes=decides and num_tokens == 1,
        times=sequence.timer.times,
    )


@dataclass(slots=True)
class StepPlan:
    """Rows to run; or nothing to run before `wake_at_s`; or a victim whose KV must go before anything can run."""

    rows: list[TargetRow] = field(default_factory=list)
    victim: TargetSequence | None = None
    held: list[tuple[TargetSequence, float]] = field(default_factory=list)
    """Sequences that wait for a draft, and the latest time until which they wait, in monotonic seconds."""

    @property
    def wake_at_s(self) -> float | None:
        return min((until_s for _, until_s in self.held), default=None)


def admissible(sequences: Sequence[TargetSequence], batching: Batching, free_blocks: int) -> list[TargetSequence]:
    """The waiting sequences that get KV now: in the order of opening, as long as all that have KV can finish their
    prefill.

    A sequence whose grammar is being compiled does not delay the others.
    """
    size, admitted = batching.block_size, list[TargetSequence]()
    waiting = [s for s in sequences if s.kv is None and not s.compiling]
    if not waiting:
        return admitted
    free_blocks -= sum(_outstanding(s, size) for s in sequences if s.kv is not None)
    for sequence in sorted(waiting, key=lambda s: s.serial):
        free_blocks -= _outstanding(sequence, size)
        if free_blocks < 0:
            break
        admitted.append(sequence)
    return admitted


def _outstanding(sequence: TargetSequence, size: int) -> int:
    return blocks_for(sequence.committed_len, size) - blocks_for(sequence.cached_len, size)


def plan(
    sequences: Sequence[TargetSequence],
    batching: Batching,
    free_blocks: int,
    now_s: float,
    pricing: Pricing | None = None,
) -> StepPlan:
    """The next step of the sequences that have a place."""
    pricing = pricing or Pricing()
    running = sorted((s for s in sequences if s.kv is not None and not s.awaits_mask), key=lambda s: s.serial)
    held, decoding, prefilling = list[tuple[TargetSequence, float]](), list[TargetSequence](), list[TargetSequence]()
    for sequence in running:
        if sequence.pending > 1:
            prefilling.append(sequence)
        elif (until_s := sequence.held_until(now_s)) is not None and pricing.may_pay(sequence.drafts):
            held.append((sequence, until_s))
        else:
            decoding.append(sequence)
    if decoding or prefilling:
        # The step runs in any case, and a sequence that missed it would lose a certain token to save one row.
        decoding, held = [s for s in running if s.pending == 1], []
    if prefilling:
        # A step with a chunk of a prompt is never a recorded one.
        pricing = replace(pricing, num_free=lambda num_rows, num_tokens: 0)
    room = StepRoom(batching.max_batch_tokens, free_blocks, batching.block_size)
    rows = _decode(decoding, room)
    if rows is not None:
        waiting_tokens = sum(s.pending for s in prefilling)
        keep_tokens = min(waiting_tokens, int(batching.max_batch_tokens * batching.prefill_share))
        _add_drafts(rows, room, keep_tokens, pricing, batching)
        rows += _prefill(prefilling, room)
        _add_drafts([row for row in rows if row.decides and not row.decodes], room, 0, pricing, batching)
    if (decoding or prefilling) and not rows:
        return StepPlan(victim=running[-1])
    return StepPlan(rows=rows or [], held=held)


def _decode(decoding: list[TargetSequence], room: StepRoom) -> list[TargetRow] | None:
    """One token for each, oldest first; None when the pool cannot hold them all."""
    rows = [_row(sequence, 1) for sequence in decoding[: room.tokens]]
    blocks = sum(row.start % room.block_size == 0 for row in rows)
    if blocks > room.blocks:
        return None
    room.tokens -= len(rows)
    room.blocks -= blocks
    return rows


def _add_drafts(rows: list[TargetRow], room: StepRoom, keep_tokens: int, pricing: Pricing, batching: Batching) -> None:
    for row in rows:
        row.draft = pricing.offered(row.sequence.drafts, row.sequence.max_depth)
    drafted = [row for row in rows if row.draft.token_ids]
    taken = take_drafts(
        [row.draft for row in drafted],
        [pricing.values(row.sequence.drafts, row.draft) for row in drafted],
        room,
        pricing,
        keep_tokens=keep_tokens,
        max_branch_tokens=batching.max_branch_tokens,
        num_rows=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
    )
    for row, draft in zip(drafted, taken, strict=True):
        row.draft = draft


def _prefill(prefilling: list[TargetSequence], room: StepRoom) -> list[TargetRow]:
    rows, wanted_left = [], _MAX_PROMPT_LOGPROBS
    for sequence in prefilling:
        wanted = sequence.pending
        if sequence.wants_prompt_logprobs:
            wanted = min(wanted, wanted_left)
            wanted_left -= wanted
        if not wanted:
            continue
        count = room.fit(sequence.cached_len, wanted)
        if not count:
            break
        room.take(sequence.cached_len, count)
        rows.append(_row(sequence, count))
    return rows
