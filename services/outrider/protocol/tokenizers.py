"""Transfer of a serialised Tokenizer from a target to a gateway: identified by its hash, sent in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, Iterator

from outrider.errors import Unavailable

_CHUNK_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 256 << 20
"""A few times the size of the largest vocabularies."""


def sha256_of(data: bytes) -> str:
    """In hex; empty for no data."""
    return hashlib.sha256(data).hexdigest() if data else ""


def chunks_of(data: bytes) -> Iterator[bytes]:
    return (data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES))


async def joined(chunks: AsyncIterable[bytes], sha256: str) -> bytes:
    """The chunks in one piece. Raises Unavailable when they are too long or do not have this hash."""
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > MAX_TOKENIZER_BYTES:
            raise Unavailable(f"tokenizer: more than {MAX_TOKENIZER_BYTES} bytes", reason="BAD_TOKENIZER")
    if (found := sha256_of(bytes(data))) != sha256:
        raise Unavailable(f"tokenizer_sha256: {sha256} was asked for, {found} came", reason="BAD_TOKENIZER")
    return bytes(data)
