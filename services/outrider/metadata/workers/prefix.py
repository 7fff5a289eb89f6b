"""The block hashes in one worker's prefix cache, for the index in Redis.

The index is a copy. It expires with the lease, and is rewritten from here after a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from outrider.prefix import HASH_BYTES

CHUNK = 2000
MAX_LOOKUP_BLOCKS = 8192


@dataclass(slots=True)
class PrefixMirror:
    """The cached hashes, and the changes not yet written to the index."""

    held: set[bytes] = field(default_factory=set)
    stale: bool = False
    """The index may differ in any way, so it must be rewritten."""
    writing: asyncio.Task[None] | None = None
    """Writes to the index, also what changes meanwhile. Two writers could overtake each other."""
    _pending: dict[bytes, bool] = field(default_factory=dict)

    def apply(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Applies additions first. Raises ValueError for an invalid block hash."""
        added, removed = list(added), list(removed)
        if any(len(block_hash) != HASH_BYTES for block_hash in (*added, *removed)):
            raise ValueError(f"prefix: a block hash has {HASH_BYTES} bytes")
        self.held.update(added)
        self.held.difference_update(removed)
        self._pending.update(dict.fromkeys(added, True))
        self._pending.update(dict.fromkeys(removed, False))

    @property
    def dirty(self) -> bool:
        return self.stale or bool(self._pending)

    def take_all(self) -> list[bytes]:
        """All cached hashes, to rewrite the index."""
        self.stale = False
        self._pending = {}
        return list(self.held)

    def take_pending(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes added and removed since the last call."""
        pending, self._pending = self._pending, {}
        added = [block_hash for block_hash, present in pending.items() if present]
        removed = [block_hash for block_hash, present in pending.items() if not present]
        return added, removed


def chunks(hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(hashes)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
