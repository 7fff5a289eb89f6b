"""A paged step's layout as integers in one buffer, so that it reaches a device in one copy. Pure: numpy only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kv.step import Row
from outrider.engine.kv.tree import ancestor_masks, depths

Integers = NDArray[np.int64]

TOKEN_FIELDS = ("positions", "slots", "visible", "split", "own_mask")
"""One number per token: its position; its slot; how many keys it sees, 0 for padding; the same, but 0 if its keys are
not split; the mask of its tree's nodes that it sees (all ones in a chain)."""
TILE_FIELDS = ("tile_start", "tile_count", "tile_blocks", "tile_own")
"""One number per tile of queries: its first flat token; its number of tokens, 0 for padding; where its row's blocks
begin; the place of the tree's first node behind its row's first key."""

_CHAIN = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """Named, consecutive parts of one int64 buffer. `blocks`, whose length varies with the step, comes last."""

    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, *, tokens: int, tiles: int, blocks: int, more: Iterable[str] = ()) -> Fields:
        """`more` names further fields of one number per token."""
        names = [(name, tokens) for name in (*more, *TOKEN_FIELDS)] + [(name, tiles) for name in TILE_FIELDS]
        return cls((*names, ("blocks", blocks)))

    @property
    def total(self) -> int:
        return sum(length for _, length in self.lengths)

    def slices(self) -> dict[str, slice]:
        found, start = {}, 0
        for name, length in self.lengths:
            found[name] = slice(start, start + length)
            start += length
        return found


def num_tiles(rows: Sequence[Row], tile_queries: int) -> int:
    return sum(-(-row.num_tokens // tile_queries) for row in rows)


def fill(
    views: dict[str, Integers],
    groups: Sequence[tuple[Sequence[Row], int]],
    scratch_slot: int = 0,
) -> int:
    """Writes the layout of a step. Returns how many blocks it wrote; the rest of the other fields becomes padding.

    A group is rows and the queries of one of their tiles; the first group's keys are split. Their tiles follow one
    another in the order of the groups. Padding tokens go to `scratch_slot`.
    """
    views["positions"][:] = 0
    views["slots"][:] = scratch_slot
    views["visible"][:] = 0
    views["split"][:] = 0
    views["own_mask"][:] = _CHAIN
    tiles = blocks = 0
    for number, (rows, tile_queries) in enumerate(groups):
        if rows:
            columns = _Rows.of(rows, blocks)
            columns.fill_tokens(views, rows[0].block_size, split=number == 0)
            tiles = columns.fill_tiles(views, tile_queries, tiles)
            blocks = int(columns.blocks[-1])
            for row in rows:
                if row.tree:
                    _fill_tree(views, row)
    views["tile_count"][tiles:] = 0
    return blocks


class _Rows(NamedTuple):
    """Rows as columns, one number for each."""

    starts: Integers
    counts: Integers
    kv_lens: Integers
    nodes: Integers
    """Of a tree that branches."""
    sighted: Integers
    """kv_len, where its tokens see those after them too; 0 elsewhere."""
    blocks: Integers
    """Where those of each begin; at last where those of all end."""
    all_blocks: array[int]

    @classmethod
    def of(cls, rows: Sequence[Row], first_block: int) -> _Rows:
        columns = [(row.start, row.num_tokens, row.kv_len, len(row.tree), row.kv_len * row.both_ways) for row in rows]
        starts, counts, kv_lens, nodes, sighted = np.array(columns).T
        blocks = np.cumsum([first_block, *(len(row.blocks) for row in rows)])
        all_blocks = array("q")
        for row in rows:
            all_blocks.extend(row.blocks)
        return cls(starts, counts, kv_lens, nodes, sighted, blocks, all_blocks)

    def fill_tokens(self, views: dict[str, Integers], block_size: int, *, split: bool) -> None:
        row, place = _places(self.counts)
        tokens, at = self.starts[row] + place, (self.kv_lens - self.counts)[row] + place
        first, last = self.blocks[0], self.blocks[-1]
        views["blocks"][first:last] = self.all_blocks
        blocks = views["blocks"][self.blocks[row] + at // block_size]
        views["positions"][tokens] = at
        views["slots"][tokens] = blocks * block_size + at % block_size
        views["visible"][tokens] = visible = np.maximum(at + 1, self.sighted[row])
        if split:
            views["split"][tokens] = visible

    def fill_tiles(self, views: dict[str, Integers], tile_queries: int, tile: int) -> int:
        """Returns the number of the next tile."""
        row, place = _places(-(-self.counts // tile_queries))
        first, at = place * tile_queries, slice(tile, tile + len(row))
        views["tile_start"][at] = self.starts[row] + first
        views["tile_count"][at] = np.minimum(tile_queries, self.counts[row] - first)
        views["tile_blocks"][at] = self.blocks[row]
        views["tile_own"][at] = (self.kv_lens - self.nodes)[row]
        return at.stop


def _fill_tree(views: dict[str, Integers], row: Row) -> None:
    end, count = row.start + row.num_tokens, len(row.tree)
    at, positions = slice(end - count, end), np.add(row.kv_len - count, depths(row.tree))
    views["positions"][at] = positions
    views["visible"][at] = views["split"][at] = positions + 1
    views["own_mask"][at] = ancestor_masks(row.tree)


def _places(counts: Integers) -> tuple[Integers, Integers]:
    """Of each of a row's items, row after row: the number of its row, and its place in it."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
