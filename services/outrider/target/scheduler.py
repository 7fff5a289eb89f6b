"""What the next step runs. Pure: sequences, free blocks and the clock in, a plan out.

Every step mixes plain decoding, verification and chunks of prefill. Decoding goes first, one token each; a quarter of
the step is kept for prefill while there is any; drafts fill what decoding leaves; prefill gets the rest. Drafts never
cost another sequence its KV; decoding does, and then the newest sequence pays and is recomputed later. What is left
after all that goes to other tokens in the place of guessed ones, as far as their rows are worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.speculation import VerificationMode
from outrider.target.drafts import Beside
from outrider.target.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class Batching:
    """The size of a step."""

    block_size: int
    """Tokens in one KV block."""
    max_batch_tokens: int = 512
    prefill_share: float = 0.25
    """Of max_batch_tokens, what drafts leave to prefill while there is any."""
    max_siblings: int = 8
    """Most tokens that are judged beside one guess."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_batch_tokens < 1:
            raise ValueError("max_batch_tokens: must be at least 1")
        if not 0 <= self.prefill_share <= 1:
            raise ValueError(f"prefill_share: {self.prefill_share} is not in [0, 1]")
        if self.max_siblings < 0:
            raise ValueError("max_siblings: must not be negative")


@dataclass(slots=True)
class PlannedRow:
    """One sequence's part of the step: committed tokens to run, then drafts to judge."""

    sequence: TargetSequence
    num_tokens: int
    """Of the sequence's pending tokens."""
    num_drafted: int = 0
    late: bool = False
    """Whether a draft that came during the step is judged as well, for the position after all of them."""
    siblings: list[Beside] = field(default_factory=list)
    """Judged beside the drafted tokens."""
    decides: bool = field(init=False)
    """Whether the row ends in a verdict: all that was pending is run. Otherwise it is a chunk of prefill."""

    def __post_init__(self) -> None:
        self.decides = self.num_tokens == self.sequence.pending

    def drop_draft(self) -> None:
        """Runs the committed tokens alone. Ratio mode judges the first drafted token all the same: it was drawn."""
        self.num_drafted = 0
        self.siblings = []

    @property
    def num_run(self) -> int:
        return self.num_tokens + self.num_drafted + len(self.siblings)

    @property
    def num_judged(self) -> int:
        return self.num_drafted + self.late


@dataclass(slots=True)
class Plan:
    """Rows to run; or nothing to run before `wake_at_s`; or a victim whose KV must go before anything can run."""

    rows: list[PlannedRow] = field(default_factory=list)
    victim: TargetSequence | None = None
    held: list[tuple[TargetSequence, float]] = field(default_factory=list)
    """Sequences that wait for a draft, and until when at most."""

    @property
    def wake_at_s(self) -> float | None:
        return min((until_s for _, until_s in self.held), default=None)


@dataclass(slots=True)
class _Room:
    """What is left of the step's tokens and of the pool's blocks."""

    tokens: int
    blocks: int
    block_size: int

    def fit(self, start: int, wanted: int, keep_tokens: int = 0) -> int:
        """How many of `wanted` tokens from position `start` on can be had."""
        slots = (blocks_for(start, self.block_size) + self.blocks) * self.block_size - start
        return max(0, min(wanted, self.tokens - keep_tokens, slots))

    def take_beside(self) -> bool:
        """A token beside others takes a block of its own. False where there is no room for one."""
        if not (self.tokens and self.blocks):
            return False
        self.tokens -= 1
        self.blocks -= 1
        return True

    def take(self, start: int, count: int) -> None:
        self.tokens -= count
        self.blocks -= blocks_for(start + count, self.block_size) - blocks_for(start, self.block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def admissible(sequences: Sequence[TargetSequence], batching: Batching, free_blocks: int) -> list[TargetSequence]:
    """Which waiting sequences get a place now: in the order of opening, while all that hold one can finish prefill."""
    size = batching.block_size
    free_blocks -= sum(_outstanding(s, size) for s in sequences if s.kv is not None)
    admitted = []
    for sequence in sorted((s for s in sequences if s.kv is None), key=lambda s: s.serial):
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
    least_chance: float = math.inf,
) -> Plan:
    """The next step of the sequences that have a place. `least_chance`: of a token worth a row beside others."""
    running = sorted((s for s in sequences if s.kv is not None), key=lambda s: s.serial)
    held = [(s, until_s) for s in running if (until_s := s.held_until(now_s)) is not None]
    waiting = {s.key for s, _ in held}
    ready = [s for s in running if s.key not in waiting]
    decoding = [s for s in ready if s.pending == 1]
    prefilling = [s for s in ready if s.pending > 1]
    room = _Room(batching.max_batch_tokens, free_blocks, batching.block_size)
    rows = _decode(decoding, room)
    if rows is not None:
        waiting_tokens = sum(s.pending for s in prefilling)
        _add_drafts(rows, room, min(waiting_tokens, int(batching.max_batch_tokens * batching.prefill_share)))
        verifying = [row for row in rows if row.num_drafted]
        rows += _prefill(prefilling, room)
        _add_siblings(verifying, room, batching.max_siblings, least_chance)
    if ready and not rows:
        return Plan(victim=running[-1])
    return Plan(rows=rows or [], held=held)


def _decode(decoding: list[TargetSequence], room: _Room) -> list[PlannedRow] | None:
    """One token for each, oldest first; None when the pool cannot hold them all."""
    rows = []
    for sequence in decoding[: room.tokens]:
        if not room.fit(sequence.cached_len, 1):
            return None
        room.take(sequence.cached_len, 1)
        rows.append(PlannedRow(sequence, num_tokens=1))
    return rows


def _add_drafts(rows: list[PlannedRow], room: _Room, keep_tokens: int) -> None:
    for row in rows:
        start = row.sequence.cached_len + row.num_tokens
        row.num_drafted = room.fit(start, row.sequence.num_offered, keep_tokens)
        room.take(start, row.num_drafted)


def _add_siblings(rows: list[PlannedRow], room: _Room, most: int, least_chance: float) -> None:
    """The likeliest first, whose guess ever they stand beside."""
    if not most or least_chance >= 1:
        return
    found = [
        (beside, row)
        for row in rows
        if row.sequence.mode is not VerificationMode.RATIO
        for beside in row.sequence.drafts.beside(row.sequence.tokens, row.num_drafted)
        # A draft may say that a chance is no number.
        if beside.chance >= least_chance
    ]
    found.sort(key=lambda pair: -pair[0].chance)
    for beside, row in found:
        if len(row.siblings) < most and room.take_beside():
            row.siblings.append(beside)


def _prefill(prefilling: list[TargetSequence], room: _Room) -> list[PlannedRow]:
    rows = []
    for sequence in prefilling:
        count = room.fit(sequence.cached_len, sequence.pending)
        if not count:
            break
        room.take(sequence.cached_len, count)
        row = PlannedRow(sequence, count)
        if row.decides:
            _add_drafts([row], room, 0)
        rows.append(row)
    return rows
