"""Batches of ragged rows over a cache full of other people's numbers, for kernels to be held against the reference."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from outrider.engine.attention import Attention, KVCache, SdpaAttention, Shape
from outrider.engine.attention.paged import TritonAttention
from outrider.engine.kv.step import EngineSequence, Row
from outrider.engine.kv.tree import path_to
from torch import Tensor

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Problem:
    """A batch over a cache full of other people's numbers."""

    shape: Shape
    rows: list[Row]
    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    window: int | None = None

    def attend(self, attention: Attention) -> tuple[Tensor, KVCache]:
        """[tokens, heads * head_dim], and the cache after it."""
        cache = KVCache(self.keys.clone()[None], self.values.clone()[None])
        batch = attention.prepare(self.rows, cache)
        return batch.attend(self.query, self.key, self.value, 0, self.shape.head_dim**-0.5), cache

    def only(self, number: int, tokens: Sequence[int]) -> Problem:
        """These of one row's new tokens, one after another, alone in their batch."""
        row = self.rows[number]
        alone = laid_out(0, row.cached_len, len(tokens), row.blocks, row.block_size)
        at = [row.start + token for token in tokens]
        others = {name: getattr(self, name)[at] for name in ("query", "key", "value")}
        return replace(self, rows=[alone], **others)


def laid_out(
    start: int, cached: int, new: int, blocks: Sequence[int], block_size: int, tree: Sequence[int] = ()
) -> Row:
    """A row of any tokens, with its nodes as they lie."""
    row = Row(EngineSequence(tokens=[0] * cached, blocks=array("q", blocks)), [0] * new, 0)
    row.lay_out(start, block_size)
    row.tree = tree
    return row


def problem(
    rows: list[tuple[int, int]],
    *,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    trees: bool = False,
    device: torch.device = CPU,
    num_blocks: int = 64,
    window: int | None = None,
) -> Problem:
    """rows: (cached, new) tokens of each."""
    shape = shape or Shape(8, 2, 16, 8)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    free = list(range(num_blocks))
    rng.shuffle(free)
    made: list[Row] = []
    for cached, new in rows:
        blocks = [free.pop() for _ in range(-(-(cached + new) // shape.block_size))]
        start = sum(row.num_tokens for row in made)
        parents = tree_parents(new, rng) if trees else ()
        made.append(laid_out(start, cached, new, blocks, shape.block_size, parents))
    tokens = sum(new for _, new in rows)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    slots = num_blocks * shape.block_size
    return Problem(
        shape,
        made,
        normal(tokens, shape.heads, shape.head_dim),
        normal(tokens, shape.kv_heads, shape.head_dim),
        normal(tokens, shape.kv_heads, shape.head_dim),
        normal(shape.kv_heads, slots, shape.head_dim),
        normal(shape.kv_heads, slots, shape.head_dim),
        window,
    )


def tree_parents(count: int, rng: random.Random) -> list[int]:
    """Several nodes may follow the token before the tree."""
    return [rng.randint(-1, node - 1) for node in range(count)]


def by_kernels(given: Problem) -> TritonAttention:
    return TritonAttention(given.shape, given.query.device, (given.window,))


def assert_equals_reference(given: Problem, attention: TritonAttention | None = None) -> None:
    want, want_cache = given.attend(SdpaAttention((given.window,)))
    got, cache = given.attend(attention or by_kernels(given))
    assert torch.equal(cache.keys[0], want_cache.keys[0])
    assert torch.equal(cache.values[0], want_cache.values[0])
    assert (got - want).abs().max() <= TOLERANCE[got.dtype] * want.abs().max()


def assert_same_bits_alone(given: Problem) -> None:
    """Each new token gets in a batch, and in a tree, what it gets in the chain that leads to it, alone."""
    attention = by_kernels(given)
    together, _ = given.attend(attention)
    for number, row in enumerate(given.rows):
        parents = row.tree or range(-1, row.num_tokens - 1)
        for token in range(row.num_tokens):
            chain, _ = given.only(number, path_to(parents, token)).attend(attention)
            assert torch.equal(chain[-1], together[row.start + token])
