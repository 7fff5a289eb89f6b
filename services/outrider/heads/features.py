"""What a head reads at positions that are in the target's prefix cache: a hit runs nothing, so it gives no states.

Kept block by block under the hashes of prefixes, which have the cache salt in them, and within a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.prefix import block_hashes

# It divides the block sizes of engines, at whose multiples cached prefixes end.
BLOCK = 8
_MAX_BYTES = 64_000_000


@dataclass(slots=True)
class FeatureCache:
    """Of all sequences. The block that was used longest ago goes first."""

    most_bytes: int = _MAX_BYTES
    num_bytes: int = 0
    _blocks: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict)

    def find(self, tokens: Sequence[int], salt: bytes, end: int) -> Tensor | None:
        """The features [end, width] of the positions below `end`; None unless all are known."""
        hashes = block_hashes(tokens[:end], BLOCK, salt)
        if end % BLOCK or not end or any(each not in self._blocks for each in hashes):
            return None
        for each in hashes:
            self._blocks.move_to_end(each)
        return torch.cat([self._blocks[each] for each in hashes])

    def put(self, block: bytes, features: Tensor) -> None:
        """features [BLOCK, width]."""
        if block not in self._blocks:
            # A view would keep the whole step's states.
            self._blocks[block] = features.clone()
            self.num_bytes += _bytes(features)
        self._blocks.move_to_end(block)
        while self.num_bytes > self.most_bytes:
            self.num_bytes -= _bytes(self._blocks.popitem(last=False)[1])

    def clear(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0


@dataclass(slots=True)
class FeatureWriter:
    """One sequence's way into the cache."""

    cache: FeatureCache
    salt: bytes
    _begin: int = 0
    _end: int = 0
    """Of the positions whose features came."""
    _parent: bytes | None = None
    _waiting: list[Tensor] = field(default_factory=list)
    """Features of the positions from _begin on, of a block that is not complete."""

    def before(self, tokens: Sequence[int], end: int) -> Tensor | None:
        """The features [end, width] of the positions below `end`; None unless all are known."""
        if end != self._end:
            return self.cache.find(tokens, self.salt, end)
        blocks = self.cache.find(tokens, self.salt, self._begin) if self._begin else None
        if not self._waiting or (blocks is None and self._begin):
            return None
        return torch.cat(self._waiting if blocks is None else [blocks, *self._waiting])

    def add(self, tokens: Sequence[int], start: int, features: Tensor) -> None:
        """Features of the positions from `start` on, some of which may be known; `tokens`: of the sequence so far."""
        if start > self._end:
            self._skip(tokens, start)
        self._waiting.append(features[self._end - start :] if start < self._end else features)
        self._end = max(self._end, start + len(features))
        end = min(self._end, len(tokens))
        if end < self._begin + BLOCK:
            return
        waiting = torch.cat(self._waiting)
        while end >= self._begin + BLOCK:
            block = tokens[self._begin : self._begin + BLOCK]
            [self._parent] = block_hashes(block, BLOCK, self.salt, parent=self._parent)
            self.cache.put(self._parent, waiting[:BLOCK])
            waiting = waiting[BLOCK:]
            self._begin, self._waiting = self._begin + BLOCK, [waiting]

    def _skip(self, tokens: Sequence[int], start: int) -> None:
        """Goes on with the first block that begins at `start` or later."""
        self._begin = self._end = -(-start // BLOCK) * BLOCK
        self._waiting = []
        self._parent = block_hashes(tokens[: self._begin], BLOCK, self.salt)[-1]


def _bytes(features: Tensor) -> int:
    return features.numel() * features.element_size()
