"""The pool of KV blocks: reference counts, sharing by hash, least-recently-used eviction.

Knows block ids and hashes; not what lies in a block.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from outrider.engine.sequence import OutOfBlocks


class PrefixChanges(NamedTuple):
    """Hashes that became findable, or ceased to be, since the last look."""

    added: list[bytes]
    removed: list[bytes]


class BlockPool:
    """Hands out blocks. One is free, held by one or more sequences, or cached: held by nobody, findable by hash."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        """Cached blocks whose contents were given up for new ones, since the start."""
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # A set ordered by insertion: ids leave in the order they were freed, so runs stay together.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes = PrefixChanges([], [])

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those of evictable prefixes included."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Hands out `count` blocks, each with one reference, or raises OutOfBlocks and hands out none.

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
            self.num_evicted += 1
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

    def release(self, blocks: list[int]) -> None:
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

    def forget(self, blocks: list[int]) -> list[int]:
        """Of these held blocks, those that one sequence alone holds; nobody finds them from now on."""
        alone = [block for block in blocks if self._references[block] == 1]
        for block in alone:
            if block in self._hash_of:
                self._forget(block)
        return alone

    def is_shared(self, block: int) -> bool:
        """Whether writing to the block would be seen by others, now or later."""
        return self._references[block] > 1 or block in self._hash_of

    def take_changes(self) -> PrefixChanges:
        changes, self._changes = self._changes, PrefixChanges([], [])
        return changes

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._changes.removed.append(block_hash)
