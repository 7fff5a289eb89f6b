"""One sequence's share of the KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.attention.tree import branches, check_parents, depth_first


class OutOfBlocks(Exception):
    """The KV pool has too few free blocks. Nothing was changed; free some and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


@dataclass(slots=True)
class DraftedNodes:
    """A drafted tree and its layout: node n has its KV `places[n]` slots behind the tokens before the tree."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    order: Sequence[int]
    """The nodes depth first, as they are laid out."""
    places: Sequence[int]
    """Each node's place in that order."""
    branching: bool = False
    """Whether they are laid out in another order than they come in."""

    @classmethod
    def of(cls, token_ids: Sequence[int], parents: Sequence[int]) -> DraftedNodes:
        if not branches(parents):
            in_order = range(len(parents))
            return cls(token_ids, parents, in_order, in_order)
        check_parents(parents)
        order = depth_first(parents)
        places = [0] * len(order)
        for place, node in enumerate(order):
            places[node] = place
        return cls(token_ids, parents, order, places, branching=True)

    def placed_parents(self) -> list[int]:
        """Of the node at each place: its parent's place, or -1."""
        parents = (self.parents[node] for node in self.order)
        return [self.places[parent] if parent >= 0 else -1 for parent in parents]

    def check_path(self, path: Sequence[int]) -> None:
        """Raises ValueError unless each node of the path follows the one before it, and the first follows none."""
        before = -1
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != before:
                raise ValueError(f"path: {list(path)} is none of the drafted tree {list(self.parents)}")
            before = node


@dataclass(slots=True, eq=False)
class EngineSequence:
    """Tokens whose keys and values are cached, and the blocks that hold them."""

    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    """Token ids with KV in the cache, from position 0."""
    blocks: array[int] = field(default_factory=lambda: array("q"))
    """Block ids, in order of position. A step copies all of them to its layout, which from an array is much faster."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the blocks published so far; always a prefix of `blocks`."""
    adapter: int = -1
    """Its number in `Engine.adapt`; -1: none."""
    nodes: DraftedNodes | None = None
    """The tree of the last forward, until its nodes are kept or dropped."""

    @property
    def cached_len(self) -> int:
        return len(self.tokens)
