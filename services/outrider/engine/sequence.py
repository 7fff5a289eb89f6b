"""One sequence's share of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class OutOfBlocks(Exception):
    """The KV pool has too few free blocks. Nothing was changed; free some and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


class Sibling(NamedTuple):
    """An alternative to the row's token after `after`, run in the same step."""

    after: int
    """Index of the row's token that it follows."""
    token_id: int


@dataclass(frozen=True, slots=True)
class SiblingKV:
    """Where a sibling's KV is: in a block of its own, after a copy of the earlier positions of that block."""

    position: int
    token_id: int
    block: int


@dataclass(slots=True, eq=False)
class EngineSequence:
    """Tokens whose keys and values are cached, and the blocks that hold them."""

    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    """Token ids with KV in the cache, from position 0."""
    blocks: list[int] = field(default_factory=list)
    """Block ids, in order of position."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the blocks published so far; always a prefix of `blocks`."""
    siblings: list[SiblingKV] = field(default_factory=list)
    """Siblings of the last forward, until one is accepted or the sequence is rewound."""

    @property
    def cached_len(self) -> int:
        return len(self.tokens)
