"""The inputs of every attention implementation, and the interface that it implements."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.kv.step import Row


@dataclass(slots=True, weakref_slot=True)
class KVCache:
    """Keys and values, each [layers, kv_heads, slots, head_dim]; slot = block * block_size + offset."""

    all_keys: Tensor
    all_values: Tensor
    keys: tuple[Tensor, ...] = field(init=False)
    """Of each layer, [kv_heads, slots, head_dim]."""
    values: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.values = self.all_keys.unbind(), self.all_values.unbind()

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
        shape = (layers, kv_heads, slots, head_dim)

        def zeros() -> Tensor:
            if device.type == "cpu":
                return zeros_in_large_pages(math.prod(shape), dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(zeros(), zeros())

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots in all layers, from and to."""
        sources, targets = torch.tensor(moves, dtype=torch.int64).T.contiguous().to(self.all_keys.device)
        for cached in (self.all_keys, self.all_values):
            cached.index_copy_(2, targets, cached.index_select(2, sources))

    def wipe(self, blocks: Sequence[int], block_size: int) -> None:
        if not blocks:
            return
        at = torch.tensor(blocks, dtype=torch.int64, device=self.all_keys.device)
        for cached in (self.all_keys, self.all_values):
            cached.view(*cached.shape[:2], -1, block_size * cached.shape[3]).index_fill_(2, at, 0)


Windows = Sequence[int | None]
"""Of each layer, how many positions a token looks back at most, its own included; None: all. Empty: no windows."""


class Batch(Protocol):
    """A step's layout, prepared once, bound to the cache, and used by every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """Writes the step's keys and values to the cache and attends over it.

        query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] → [tokens, heads * head_dim].
        """
        ...


class Attention(Protocol):
    """One way to compute attention."""

    def prepare(self, rows: list[Row], cache: KVCache) -> Batch:
        """Lays out a step. Rows are in the order of the flat batch."""
        ...

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None:
        """Moves keys and values of slots, from and to, in all layers. No move writes a slot that a later one reads."""
        ...


# A step reads all weights once. On 4 kB pages a third of its time went into address translation, most of all in a
# virtual machine, where each page walk goes through two tables. Torch's own switch, THP_MEM_ALLOC_ENABLE, is not used:
# it leaves out matrices under 2 MB, and must be set before torch is imported.
_PAGE = 2 * 1024 * 1024


def zeros_in_large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """[count] zeros of `dtype`, with all pages taken now: memory taken at the first write could run out in the middle
    of a request. Uses ordinary memory if there are no large pages, or it would hardly fill one.
    """
    size = count * dtype.itemsize
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=dtype)
    # Private: for shared anonymous memory, large pages have a setting of their own, which is off nearly everywhere.
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without large pages.
        return torch.zeros(count, dtype=dtype)
    # The tensor keeps the mapping alive.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + size].view(dtype).zero_()
