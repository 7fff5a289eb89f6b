"""What every attention implementation is given and must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class KVCache:
    """Keys and values of all layers: one tensor each per layer, [kv_heads, slots, head_dim]; slot = block * block_size + offset."""

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
        make = lambda: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        return cls([make() for _ in range(layers)], [make() for _ in range(layers)])


@dataclass(slots=True)
class RowSpan:
    """One sequence's rows in the flat batch and where its keys lie."""

    start: int
    """Its first row in the flat batch."""
    num_tokens: int
    kv_len: int
    """Cached positions after this step, its own rows included."""
    slots: list[int]
    """One slot per position, kv_len of them."""

    @property
    def contiguous(self) -> bool:
        return self.slots[-1] - self.slots[0] == self.kv_len - 1


class Batch(Protocol):
    """A step's layout, prepared once and used by every layer."""

    write_slots: Tensor
    """[tokens] int64: where each row's key and value go."""


class Attention(Protocol):
    """Writes a step's keys and values to the cache and attends over them."""

    def prepare(self, spans: list[RowSpan], device: torch.device) -> Batch: ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        cache: KVCache,
        batch: Batch,
        scale: float,
    ) -> Tensor:
        """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] → [tokens, heads * head_dim]."""
        ...
