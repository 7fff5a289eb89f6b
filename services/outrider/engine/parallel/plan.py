"""A step as bytes, which rank 0 sends to the followers before each forward.

Signed 64-bit numbers in native byte order, as both ends are on one machine. Head: counts of tokens, wanted rows, wiped
blocks, moved slots and spans; then token ids, positions, wanted rows, wiped blocks, moves from and to; then each span
with its blocks and, for a tree, its parents.
"""

from __future__ import annotations

from array import array
from itertools import chain

from outrider.engine.attention import RowSpan
from outrider.engine.step import Step


def encode(step: Step) -> bytes:
    """See the module docstring."""
    counts = (len(step.wanted), len(step.wiped), len(step.moves), len(step.spans))
    numbers = array("q", (step.num_tokens, *counts))
    numbers.extend(step.token_ids)
    numbers.extend(step.positions)
    numbers.extend(step.wanted)
    numbers.extend(step.wiped)
    numbers.extend(chain.from_iterable(step.moves))
    for span in step.spans:
        numbers.extend((span.start, span.num_tokens, span.kv_len, span.block_size))
        numbers.extend((len(span.blocks), len(span.parents)))
        numbers.extend(span.blocks)
        numbers.extend(span.parents)
    return numbers.tobytes()


def decode(data: bytes) -> Step:
    """The step that was encoded. Raises ValueError for anything else."""
    reader = _Reader(data)
    num_tokens, num_wanted, num_wiped, num_moves, num_spans = reader.take(5)
    token_ids, positions, wanted = reader.take(num_tokens), reader.take(num_tokens), reader.take(num_wanted)
    wiped, moves = reader.take(num_wiped), reader.pairs(num_moves)
    step = Step(token_ids, positions, wanted, [reader.span() for _ in range(num_spans)], wiped, moves)
    reader.end()
    return step


class _Reader:
    def __init__(self, data: bytes) -> None:
        if len(data) % 8:
            raise ValueError(f"plan: {len(data)} bytes are no whole numbers")
        self._numbers = array("q")
        self._numbers.frombytes(data)
        self._at = 0

    def take(self, count: int) -> list[int]:
        if not 0 <= count <= len(self._numbers) - self._at:
            raise ValueError(f"plan: {count} numbers wanted at {self._at} of {len(self._numbers)}")
        self._at += count
        return self._numbers[self._at - count : self._at].tolist()

    def pairs(self, count: int) -> list[tuple[int, int]]:
        numbers = self.take(2 * count)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def span(self) -> RowSpan:
        start, num_tokens, kv_len, block_size, num_blocks, num_nodes = self.take(6)
        blocks, parents = self.take(num_blocks), self.take(num_nodes)
        return RowSpan(start, num_tokens, kv_len, blocks, block_size, parents)

    def end(self) -> None:
        if self._at != len(self._numbers):
            raise ValueError(f"plan: {len(self._numbers) - self._at} numbers are left over")
