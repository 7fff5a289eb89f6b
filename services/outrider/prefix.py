"""Chained block hashes: the one name that engine, metadata index and router share for a cached prefix.

A block's hash covers its tokens, all tokens before it, and the salt: equal hashes mean equal prefixes of one tenant.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes, *, parent: bytes | None = None) -> list[bytes]:
    """One 16-byte hash per full block of `token_ids`; a last partial block has none.

    With `parent`, the chain continues after the block with that hash.
    """
    chain = parent if parent is not None else hashlib.blake2b(salt, digest_size=HASH_BYTES).digest()
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("I", token_ids[start : start + block_size]).tobytes()
        chain = hashlib.blake2b(block, digest_size=HASH_BYTES, key=chain).digest()
        hashes.append(chain)
    return hashes
