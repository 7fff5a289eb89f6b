"""What every attention implementation is given and must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
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
        # Zeroed, not empty: a masked position is multiplied by 0, and 0 × NaN would be NaN.
        keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2))
        return cls(keys, values)


@dataclass(slots=True)
class RowSpan:
    """One sequence's rows in the flat batch and where its keys lie."""

    start: int
    """Its first row in the flat batch."""
    num_tokens: int
    kv_len: int
    """Cached positions after this step, its own rows included."""
    slots: list[int]
    """One slot per position of its blocks: at least kv_len. What lies in those beyond is not to be looked at."""

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order. First and last alone do not tell: blocks may be permuted."""
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))


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
