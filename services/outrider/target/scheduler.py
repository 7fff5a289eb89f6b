"""Plans the next step. Pure: sequences, free blocks and the clock in, a plan out.

Every step mixes decoding, verification and chunks of prefill. Decoding goes first, one token per sequence. A quarter of
the step is kept for prefill while there is any. Drafted tokens fill what decoding leaves, as far as each is worth its
row, and prefill gets the rest. What is then left goes to siblings, which are alternatives to drafted tokens. Decoding
may preempt the newest sequence, which is recomputed later; drafts never preempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.speculation import VerificationMode
from outrider.target.calibration import Calibration
from outrider.target.drafts import Beside
from outrider.target.sequence import TargetSequence


@dataclass(frozen=True, slots=True)
class Batching:
    """The size of a step."""

    block_size: int
    """Tokens in one KV block."""
    max_batch_tokens: int = 512
    prefill_share: float = 0.25
    """Share of max_batch_tokens that drafts leave to prefill while there is any."""
    max_siblings: int = 8
    """Most alternatives that are verified next to one draft."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.max_batch_tokens < 1:
            raise ValueError("max_batch_tokens: must be at least 1")
        if not 0 <= self.prefill_share <= 1:
            raise ValueError(f"prefill_share: {self.prefill_share} is not in [0, 1]")
        if self.max_siblings < 0:
            raise ValueError("max_siblings: must not be negative")


def _none_free(num_rows: int, num_tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Pricing:
    """What drafted tokens cost, and how likely they are accepted. By default all are verified."""

    price: float = 0.0
    """Price of a row: the least chance, times the sequence's weight, at which a token is verified."""
    calibration: Calibration = field(default_factory=Calibration)
    num_free: Callable[[int, int], int] = _none_free
    """(sequences, tokens) of a step → how many more tokens it would run in the same time, as a recorded step does."""
    sibling_price: float = math.inf
    """As `price`, for a sibling; infinite when none are run."""

    def values(self, sequence: TargetSequence) -> list[float]:
        """Weight times chance of each offered token. Never rises from one token to the next."""
        weight = sequence.speculation.weight
        return [weight * chance for chance in self.calibration.chances(sequence.bins, sequence.fit)]

    def may_pay(self, sequence: TargetSequence) -> bool:
        """Whether any draft that could still come would be verified."""
        return sequence.speculation.weight * self.calibration.best(sequence.fit) >= self.price


@dataclass(slots=True)
class PlannedRow:
    """One sequence's part of the step: committed tokens to run, then drafts to verify."""

    sequence: TargetSequence
    num_tokens: int
    """How many of the sequence's pending tokens are run."""
    num_drafted: int = 0
    siblings: list[Beside] = field(default_factory=list)
    """Alternatives that are verified next to the drafted tokens."""
    decides: bool = field(init=False)
    """Whether all pending tokens are run, so that the row ends in a verdict. Otherwise it is a chunk of prefill."""

    def __post_init__(self) -> None:
        self.decides = self.num_tokens == self.sequence.pending

    def drop_draft(self) -> None:
        """Runs the committed tokens alone. Ratio mode still verifies the first drafted token, because it was
        sampled."""
        self.num_drafted = 0
        self.siblings = []

    @property
    def decodes(self) -> bool:
        """Whether it runs one committed token, and so nothing of a prompt."""
        return self.decides and self.num_tokens == 1

    @property
    def num_run(self) -> int:
        return self.num_tokens + self.num_drafted + len(self.siblings)


@dataclass(slots=True)
class Plan:
    """Rows to run; or nothing to run before `wake_at_s`; or a victim whose KV must go before anything can run."""

    rows: list[PlannedRow] = field(default_factory=list)
    victim: TargetSequence | None = None
    held: list[tuple[TargetSequence, float]] = field(default_factory=list)
    """Sequences that wait for a draft, and the latest time until which they wait, in monotonic seconds."""

    @property
    def wake_at_s(self) -> float | None:
        return min((until_s for _, until_s in self.held), default=None)


@dataclass(slots=True)
class _Room:
    """The tokens left in the step and the blocks left in the pool."""

    tokens: int
    blocks: int
    block_size: int

    def fit(self, start: int, wanted: int, keep_tokens: int = 0) -> int:
        """How many of `wanted` tokens fit from position `start` on."""
        slots = (blocks_for(start, self.block_size) + self.blocks) * self.block_size - start
        return max(0, min(wanted, self.tokens - keep_tokens, slots))

    def take_beside(self) -> bool:
        """Takes a token and the KV block that a sibling needs for itself. False when there is no room."""
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
    """The waiting sequences that get KV now: in the order of opening, as long as all that have KV can finish their
    prefill.

    A sequence whose grammar is being compiled does not delay the others.
    """
    size = batching.block_size
    free_blocks -= sum(_outstanding(s, size) for s in sequences if s.kv is not None)
    admitted = []
    waiting = (s for s in sequences if s.kv is None and not s.opening.compiling)
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
) -> Plan:
    """The next step of the sequences that have a place."""
    pricing = pricing or Pricing()
    if any(s.kv is not None and s.pending > 1 for s in sequences):
        # A step with a chunk of a prompt is never a recorded one.
        pricing = replace(pricing, num_free=_none_free)
    running = sorted((s for s in sequences if s.kv is not None), key=lambda s: s.serial)
    held = [(s, until_s) for s in running if (until_s := s.held_until(now_s)) is not None and pricing.may_pay(s)]
    waiting = {s.key for s, _ in held}
    ready = [s for s in running if s.key not in waiting]
    decoding = [s for s in ready if s.pending == 1]
    prefilling = [s for s in ready if s.pending > 1]
    room = _Room(batching.max_batch_tokens, free_blocks, batching.block_size)
    rows = _decode(decoding, room)
    if rows is not None:
        waiting_tokens = sum(s.pending for s in prefilling)
        keep_tokens = min(waiting_tokens, int(batching.max_batch_tokens * batching.prefill_share))
        _add_drafts(rows, room, keep_tokens, pricing)
        verifying = [row for row in rows if row.num_drafted]
        rows += _prefill(prefilling, room, pricing)
        _add_siblings(verifying, room, batching.max_siblings, pricing.sibling_price)
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


def _add_drafts(rows: list[PlannedRow], room: _Room, keep_tokens: int, pricing: Pricing) -> None:
    """Adds drafted tokens of all rows, the most valuable first, as long as a token is worth its row or the row is free.

    A sequence's tokens stay in order: the value of a later one is never higher.
    """
    offered = [(value, row) for row in rows for value in _values(row, pricing)]
    offered.sort(key=lambda pair: -pair[0])
    num_tokens = sum(row.num_run for row in rows)
    full: set[int] = set()
    for value, row in offered:
        # Written so that NaN is worth nothing.
        if not (value >= pricing.price or pricing.num_free(len(rows), num_tokens)):
            break
        start = row.sequence.cached_len + row.num_tokens + row.num_drafted
        if row.sequence.serial in full or not room.fit(start, 1, keep_tokens):
            full.add(row.sequence.serial)
            continue
        room.take(start, 1)
        row.num_drafted += 1
        num_tokens += 1


def _values(row: PlannedRow, pricing: Pricing) -> list[float]:
    if not pricing.price:
        return [1.0] * row.sequence.num_offered
    return pricing.values(row.sequence)


def _add_siblings(rows: list[PlannedRow], room: _Room, most: int, price: float) -> None:
    """Adds siblings, the likeliest of all rows first."""
    if not most or price >= 1:
        return
    found = [
        (beside, row)
        for row in rows
        if row.sequence.mode is not VerificationMode.RATIO
        for beside in row.sequence.drafts.beside(row.sequence.tokens, row.num_drafted)
        # A draft may send NaN.
        if beside.chance >= price
    ]
    found.sort(key=lambda pair: -pair[0].chance)
    for beside, row in found:
        if len(row.siblings) < most and room.take_beside():
            row.siblings.append(beside)


def _prefill(prefilling: list[TargetSequence], room: _Room, pricing: Pricing) -> list[PlannedRow]:
    rows = []
    for sequence in prefilling:
        count = room.fit(sequence.cached_len, sequence.pending)
        if not count:
            break
        room.take(sequence.cached_len, count)
        row = PlannedRow(sequence, count)
        if row.decides:
            _add_drafts([row], room, 0, pricing)
        rows.append(row)
    return rows
