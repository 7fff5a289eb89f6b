"""A paged step's layout as integers in one buffer, so that it reaches a device in one copy. Pure: numpy only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.attention.interface import RowSpan
from outrider.engine.tree import ancestor_masks, depths

Integers = NDArray[np.int64]

TOKEN_FIELDS = ("positions", "slots", "visible", "split", "own_mask")
"""One number per token: its position; its slot; the number of keys up to its own, 0 for padding; the same, but 0 if its
keys are not split; the mask of its row's own tokens that it may attend to (all ones in a chain)."""
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


def num_tiles(spans: Sequence[RowSpan], tile_queries: int) -> int:
    """Tiles that the spans make."""
    return sum(-(-span.num_tokens // tile_queries) for span in spans)


def fill(
    views: dict[str, Integers],
    groups: Sequence[tuple[Sequence[RowSpan], int]],
    scratch_slot: int = 0,
) -> int:
    """Writes the layout of a step. Returns how many blocks it wrote; the rest of the other fields becomes padding.

    A group is spans and the queries of one of their tiles; the first group's keys are split. Their tiles follow one
    another in the order of the groups. Padding tokens go to `scratch_slot`.
    """
    views["positions"][:] = 0
    views["slots"][:] = scratch_slot
    views["visible"][:] = 0
    views["split"][:] = 0
    views["own_mask"][:] = _CHAIN
    tiles = blocks = 0
    for number, (spans, tile_queries) in enumerate(groups):
        for span in spans:
            _fill_tokens(views, span, split=number == 0)
            tiles = _fill_tiles(views, span, tile_queries, tiles, blocks)
            views["blocks"][blocks : blocks + len(span.blocks)] = array("q", span.blocks)
            blocks += len(span.blocks)
    views["tile_count"][tiles:] = 0
    return blocks


def _fill_tokens(views: dict[str, Integers], span: RowSpan, *, split: bool) -> None:
    at = slice(span.start, span.start + span.num_tokens)
    views["slots"][at] = span.written_slots()
    views["positions"][at] = np.arange(span.cached_len, span.kv_len)
    views["visible"][at] = views["positions"][at] + 1
    if split:
        views["split"][at] = views["visible"][at]
    if span.parents:
        drafted = slice(at.stop - len(span.parents), at.stop)
        views["positions"][drafted] = np.add(span.kv_len - len(span.parents), depths(span.parents))
        views["own_mask"][drafted] = ancestor_masks(span.parents)


def _fill_tiles(views: dict[str, Integers], span: RowSpan, tile_queries: int, tile: int, blocks: int) -> int:
    """Returns the number of the next tile."""
    for first in range(0, span.num_tokens, tile_queries):
        views["tile_start"][tile] = span.start + first
        views["tile_count"][tile] = min(tile_queries, span.num_tokens - first)
        views["tile_blocks"][tile] = blocks
        views["tile_own"][tile] = span.kv_len - len(span.parents)
        tile += 1
    return tile
