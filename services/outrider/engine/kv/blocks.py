"""The pool of KV blocks: reference counts, sharing by hash, least-recently-used eviction.

Knows block ids and hashes; not the contents of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from outrider.engine.kv.step import OutOfBlocks


class PrefixChanges(NamedTuple):
    """Hashes that became findable, and those that ceased to be, since the last call."""

    added: list[bytes]
    removed: list[bytes]


class BlockPool:
    """Allocates blocks. A block is free, held by one or more sequences, or cached: not held, but findable by hash."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # An ordered set: ids are reused in the order in which they were freed, so consecutive runs stay together.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes = PrefixChanges([], [])

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, including those of evictable prefixes."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Allocates `count` blocks, each with one reference, or raises OutOfBlocks and allocates none.

        Prefers the ids that follow `after`: a sequence in consecutive blocks is read without a gather.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        blocks: list[int] = []
        for _ in range(count):
            after = self._take(after)
            blocks.append(after)
        return blocks

    def _take(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            block = after + 1
            del self._free[block]
        elif self._free:
            block, _ = self._free.popitem(last=False)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, each with one more reference."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._cached.pop(block, None)
            self._references[block] += 1
        return found

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes `block` findable. If another block already has the hash, that one stays the findable one."""
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._changes.added.append(block_hash)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference each. The last block goes first, so that an eviction cuts a prefix from its end."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] < 0:
                raise AssertionError(f"block {block} released twice")
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free[block] = None

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Unpublishes those of these held blocks that only one sequence holds, and returns them."""
        alone = [block for block in blocks if self._references[block] == 1]
        for block in alone:
            if block in self._hash_of:
                self._forget(block)
        return alone

    def forget_unheld(self) -> list[int]:
        """Unpublishes all blocks that no sequence holds, and returns them: they are free."""
        blocks = list(self._cached)
        for block in blocks:
            self._forget(block)
        self._free.update(self._cached)
        self._cached.clear()
        return blocks

    def is_shared(self, block: int) -> bool:
        """Whether a write to the block could reach other sequences, now or later."""
        return self._references[block] > 1 or block in self._hash_of

    def take_changes(self) -> PrefixChanges:
        changes, self._changes = self._changes, PrefixChanges([], [])
        return changes

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._changes.removed.append(block_hash)
