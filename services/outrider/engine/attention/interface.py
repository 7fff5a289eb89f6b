"""The inputs of every attention implementation, and the interface that it implements."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.attention.tree import path_to, runs


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


@dataclass(slots=True)
class RowSpan:
    """One sequence's tokens in the flat batch, and the blocks of its KV."""

    start: int
    """Index of its first token in the flat batch."""
    num_tokens: int
    kv_len: int
    """Cached positions after this step, including its own tokens."""
    blocks: Sequence[int]
    """The blocks of its kv_len positions, in order. Slots of the last one beyond kv_len must not be read."""
    block_size: int
    parents: Sequence[int] = ()
    """For a tree that branches: which of its last tokens each of them follows, or -1 for the token before them all.
    They take a slot each, in this order. Without, the tokens are a chain."""
    _slots: list[int] | None = field(default=None, init=False, repr=False)

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

    def slot(self, position: int) -> int:
        """The slot of a chain's token at this position."""
        number, offset = divmod(position, self.block_size)
        return self.blocks[number] * self.block_size + offset

    def chains(self) -> list[Chain]:
        """The row as chains: its tokens up to the first branch, and each branch of a tree."""
        if not self.parents:
            return [Chain(self, self.start, self.num_tokens, self.kv_len)]
        first_node = self.kv_len - len(self.parents)
        first, *others = runs(self.parents)
        trunk = self.num_tokens - len(self.parents) + len(first)
        return [
            Chain(self, self.start, trunk, self.cached_len + trunk),
            *(self._branch(first_node, nodes) for nodes in others),
        ]

    def _branch(self, first_node: int, nodes: range) -> Chain:
        path = [*path_to(self.parents, self.parents[nodes[0]]), *nodes]
        # Nodes that lie where a chain's would are read with the positions before them.
        fork = next(place for place, node in enumerate(path) if node != place)
        slots = [self.slot(first_node + node) for node in path[fork:]]
        start = self.start + self.num_tokens - len(self.parents) + nodes[0]
        return Chain(self, start, len(nodes), first_node + len(path), slots)

    def written_slots(self) -> list[int]:
        """The slots that its own tokens are written to. The cost does not depend on the cached positions."""
        blocks, size = self.blocks, self.block_size
        return [blocks[at // size] * size + at % size for at in range(self.cached_len, self.kv_len)]

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order. Checks all blocks, because they may be permuted."""
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))


class Chain(NamedTuple):
    """Tokens of a row that follow one another, at consecutive positions."""

    span: RowSpan
    start: int
    """Index of its first token in the flat batch."""
    num_tokens: int
    kv_len: int
    """Positions that its last token sees."""
    path: Sequence[int] = ()
    """The slots of the last positions, where a tree has them elsewhere than a chain would."""

    @property
    def cached_len(self) -> int:
        """Positions before its own tokens."""
        return self.kv_len - self.num_tokens

    @property
    def fork(self) -> int:
        """The positions before this one are read from the row's blocks, in order."""
        return self.kv_len - len(self.path)

    @property
    def slots(self) -> list[int]:
        return [*self.span.slots[: self.fork], *self.path]

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order."""
        return not self.path and self.span.contiguous


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

    def prepare(self, spans: list[RowSpan], cache: KVCache) -> Batch:
        """Lays out a step. Spans are in the order of the flat batch."""
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
