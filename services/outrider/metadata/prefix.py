"""What one worker's prefix cache holds, as the index should say it.

The index in Redis is a copy. It expires with the lease, and is written anew from here when it was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from outrider.prefix import HASH_BYTES

CHUNK = 2000
MAX_LOOKUP_BLOCKS = 8192


@dataclass(slots=True)
class PrefixMirror:
    """Hashes held, and those of them the index has not been told yet."""

    held: set[bytes] = field(default_factory=set)
    stale: bool = False
    """The index may differ in any way: it has to be written anew."""
    flushing: bool = False
    """Somebody writes to the index, and takes along what is added meanwhile. Two writers could overtake each other."""
    _pending: dict[bytes, bool] = field(default_factory=dict)

    def apply(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Additions first. Raises ValueError for what is no block hash."""
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
        """Everything held, to write the index anew."""
        self.stale = False
        self._pending = {}
        return list(self.held)

    def take_pending(self) -> tuple[list[bytes], list[bytes]]:
        """Added and removed since last asked."""
        pending, self._pending = self._pending, {}
        added = [block_hash for block_hash, present in pending.items() if present]
        removed = [block_hash for block_hash, present in pending.items() if not present]
        return added, removed


def chunks(hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    iterator = iter(hashes)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk
