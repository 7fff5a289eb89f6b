"""The inputs of every attention implementation, and the interface that it implements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.pages import zeros_in_large_pages


@dataclass(slots=True, weakref_slot=True)
class KVCache:
    """Keys and values, one tensor each per layer: [kv_heads, slots, head_dim]; slot = block * block_size + offset."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        shape = (kv_heads, slots, head_dim)

        def zeros() -> Tensor:
            if device.type == "cpu":
                return zeros_in_large_pages(math.prod(shape), dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        keys, values = ([zeros() for _ in range(layers)] for _ in range(2))
        return cls(keys, values)

    def move(self, moves: Moves, layer: int) -> None:
        """Copies slots within one layer."""
        for cached in (self.keys[layer], self.values[layer]):
            cached.index_copy_(1, moves.copies, cached.index_select(1, moves.sources))

    def wipe(self, blocks: Sequence[int], block_size: int) -> None:
        """Zeros these blocks in all layers."""
        if not blocks:
            return
        at = torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
        for cached in (*self.keys, *self.values):
            cached.view(cached.shape[0], -1, block_size * cached.shape[2]).index_fill_(1, at, 0)


MAX_OWN_TOKENS = 63
"""Most tokens of a row with a tree mask, which is one signed 64-bit number per token."""


@dataclass(slots=True)
class RowSpan:
    """One sequence's tokens in the flat batch, and the blocks of its KV."""

    start: int
    """Index of its first token in the flat batch."""
    num_tokens: int
    kv_len: int
    """Cached positions after this step, including its own tokens."""
    blocks: list[int]
    """The blocks of its kv_len positions, in order. Slots of the last one beyond kv_len must not be read."""
    block_size: int
    own_masks: Sequence[int] | None = None
    """For a tree, one bit mask per token of the row's own tokens that it attends to (bit 0 is the first). Every token
    attends to all positions cached before. None means a chain: each attends to the tokens up to itself."""
    beside: int = 0
    """For a sibling, a span of one token: how many spans before it its row is. It attends as that row's token at the
    same position does, with itself in that token's place. 0 for all other spans."""
    copied_block: int | None = None
    """For a sibling, the block whose earlier positions are copied to its last block. Every layer copies them after the
    other tokens of the step are written, so that the sibling reads a chain's layout."""
    _slots: list[int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.beside and self.num_tokens != 1:
            raise ValueError(f"beside: {self.num_tokens} tokens, where one stands alone")
        if self.own_masks is None:
            return
        if len(self.own_masks) != self.num_tokens or self.num_tokens > MAX_OWN_TOKENS:
            raise ValueError(f"own_masks: {len(self.own_masks)} for {self.num_tokens} tokens, at most {MAX_OWN_TOKENS}")
        for index, mask in enumerate(self.own_masks):
            if not (mask >> index) == 1:
                raise ValueError(f"own_masks[{index}]: a token sees itself, and none after itself")

    @property
    def cached_len(self) -> int:
        """Positions cached before this step."""
        return self.kv_len - self.num_tokens

    @property
    def slots(self) -> list[int]:
        """One slot per position of its blocks; at least kv_len slots."""
        if self._slots is None:
            size = self.block_size
            self._slots = [slot for block in self.blocks for slot in range(block * size, (block + 1) * size)]
        return self._slots

    def written_slots(self) -> list[int]:
        """The slots that its own tokens are written to. The cost does not depend on the cached positions."""
        blocks, size = self.blocks, self.block_size
        return [blocks[at // size] * size + at % size for at in range(self.cached_len, self.kv_len)]

    def copied_slots(self) -> tuple[list[int], list[int]]:
        """Source and destination slots of the copy."""
        if self.copied_block is None:
            return [], []
        size, count = self.block_size, self.cached_len % self.block_size
        sources, copies = (range(block * size, block * size + count) for block in (self.copied_block, self.blocks[-1]))
        return list(sources), list(copies)

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order. Checks all blocks, because they may be permuted."""
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies that each layer makes before it attends: source and destination slots, int64 [slots] each."""

    sources: Tensor
    copies: Tensor

    @classmethod
    def of(cls, spans: Sequence[RowSpan], device: torch.device) -> Moves | None:
        found = [span.copied_slots() for span in spans if span.copied_block is not None]
        if not found:
            return None
        pairs = torch.tensor([pair for sources, copies in found for pair in zip(sources, copies, strict=True)])
        sources, copies = pairs.T.contiguous().to(device)
        return cls(sources, copies)


class Batch(Protocol):
    """A step's layout, prepared once, bound to the cache, and used by every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """Writes the step's keys and values to the cache and attends over it.

        query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] → [tokens, heads * head_dim].
        """
        ...


class Attention(Protocol):
    """One way to compute attention."""

    def prepare(self, spans: list[RowSpan], cache: KVCache) -> Batch:
        """Lays out a step. Spans are in the order of the flat batch."""
        ...
