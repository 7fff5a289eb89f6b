"""Which KV blocks each sequence has, and which hold a prefix that others may find.

Knows lengths, blocks and hashes; not the keys and values in them. The caller decides which tokens are committed. A
rewind only lowers a length.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.kv.blocks import BlockPool, PrefixChanges
from outrider.engine.kv.step import EngineSequence, OutOfBlocks, Row
from outrider.prefix import block_hashes


class KVCacheManager:
    """The blocks of one engine's sequences, and the prefix cache over them."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._pool = BlockPool(num_blocks)
        self._unclean: list[int] = []
        self._moves: list[tuple[int, int]] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now, including those of evictable prefixes."""
        return self._pool.num_free

    def blocks_needed(self, sequence: EngineSequence, num_new_tokens: int) -> int:
        """Blocks that running `num_new_tokens` more would take from the pool."""
        total = -(-(len(sequence.tokens) + num_new_tokens) // self._block_size)
        return max(0, total - len(sequence.blocks))

    def open(self, prompt: Sequence[int], salt: bytes = b"") -> EngineSequence:
        """A sequence that starts with the cached prefix of `prompt`, at most all but its last token."""
        sequence = EngineSequence(salt=salt)
        if self._prefix_cache:
            size = self._block_size
            hashes = block_hashes(prompt[: (len(prompt) - 1) // size * size], size, salt)
            sequence.blocks.extend(self._pool.find(hashes))
            sequence.hashes = hashes[: len(sequence.blocks)]
            sequence.tokens = list(prompt[: len(sequence.blocks) * size])
        return sequence

    def allocate(self, rows: Sequence[Row]) -> None:
        """Gives the rows' sequences the blocks that a step writes.

        Raises OutOfBlocks, with nothing changed, when the pool cannot hold them.
        """
        needs = [self.blocks_needed(row.sequence, len(row.token_ids)) for row in rows]
        needed = sum(needs)
        if needed > self._pool.num_free:
            raise OutOfBlocks(needed, self._pool.num_free)
        for row, count in zip(rows, needs, strict=True):
            row.sequence.row = None
            if count:
                blocks = row.sequence.blocks
                blocks.extend(self._pool.allocate(count, after=blocks[-1] if blocks else None))

    def keep(self, sequence: EngineSequence, path: Sequence[int]) -> None:
        """Continues with these nodes of the last forward's tree, from the root on, and drops the others.

        Their keys and values move to the slots of a chain at the beginning of the next forward. Raises ValueError
        when they are no path of that tree.
        """
        if (row := sequence.row) is None:
            if path:
                raise ValueError(f"path: {list(path)}, and no tree was drafted")
            return
        tokens = row.drafted(path)
        if row.tree:
            slot, base = self._slot, sequence.cached_len
            for place, node in enumerate(path):
                if row.places[node] != place:
                    self._moves.append((slot(sequence, base + row.places[node]), slot(sequence, base + place)))
        sequence.tokens += tokens
        self._trim(sequence)

    def rewind(self, sequence: EngineSequence, length: int) -> None:
        """Drops the cached tokens from position `length` on, and the last forward's tree.

        A published block is never written again, so a rewind into one drops all of it:
        cached_len may end lower.
        """
        size = self._block_size
        published = len(sequence.hashes)
        if length < published * size:
            published = length // size
            length = published * size
            del sequence.hashes[published:]
        del sequence.tokens[length:]
        self._trim(sequence)

    def retract(self, sequence: EngineSequence, length: int) -> None:
        """As rewind, after a failed step. Released blocks may hold NaN, and are zeroed before the next step."""
        own = {block for block in sequence.blocks if not self._pool.is_shared(block)}
        self.rewind(sequence, length)
        self._unclean.extend(own.difference(sequence.blocks))

    def discard(self, sequence: EngineSequence) -> None:
        """As close, for a sequence that failed: blocks that only it holds are unpublished and zeroed."""
        self._unclean.extend(self._pool.forget(sequence.blocks))
        self.close(sequence)

    def publish(self, sequence: EngineSequence, committed_len: int) -> None:
        """Lets other sequences find the blocks that lie wholly below `committed_len`."""
        size = self._block_size
        done = len(sequence.hashes)
        full = min(committed_len, len(sequence.tokens)) // size
        if not self._prefix_cache or full <= done:
            return
        parent = sequence.hashes[-1] if sequence.hashes else None
        fresh = block_hashes(sequence.tokens[done * size : full * size], size, sequence.salt, parent=parent)
        for block, block_hash in zip(sequence.blocks[done:full], fresh, strict=True):
            self._pool.publish(block, block_hash)
        sequence.hashes.extend(fresh)

    def close(self, sequence: EngineSequence) -> None:
        """Releases the sequence's blocks; published ones stay findable until they are evicted."""
        sequence.row = None
        self._pool.release(sequence.blocks)
        del sequence.blocks[:]
        sequence.hashes = []
        sequence.tokens = []

    def drop_prefixes(self) -> None:
        """Of sequences that are closed: nobody finds them any more, and they are zeroed before the next step."""
        self._unclean.extend(self._pool.forget_unheld())

    def take_prefix_changes(self) -> PrefixChanges:
        """Hashes that became findable or were evicted since the last call."""
        return self._pool.take_changes()

    def take_unclean(self) -> list[int]:
        """Blocks that are zeroed before the next step."""
        unclean, self._unclean = self._unclean, []
        return unclean

    def take_moves(self) -> list[tuple[int, int]]:
        """Slots whose keys and values move at the beginning of the next step, from and to."""
        moves, self._moves = self._moves, []
        return moves

    def _slot(self, sequence: EngineSequence, position: int) -> int:
        number, offset = divmod(position, self._block_size)
        return sequence.blocks[number] * self._block_size + offset

    def _trim(self, sequence: EngineSequence) -> None:
        """Releases the blocks behind the cached tokens; what they hold of a tree is dropped."""
        sequence.row = None
        count = -(-len(sequence.tokens) // self._block_size)
        if count < len(sequence.blocks):
            self._pool.release(sequence.blocks[count:])
            del sequence.blocks[count:]
