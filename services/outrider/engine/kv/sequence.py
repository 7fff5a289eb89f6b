"""One sequence's share of the KV cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.kv.step import Row


class OutOfBlocks(Exception):
    """The KV pool has too few free blocks. Nothing was changed; free some and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


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
    row: Row | None = None
    """That of the last forward, with the tree of which nodes are kept or dropped now."""

    @property
    def cached_len(self) -> int:
        return len(self.tokens)
