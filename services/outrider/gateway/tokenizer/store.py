"""Tokenizers of targets, from a cache on this machine or else from a router.

A cached file is used only if its SHA-256 matches its name, so any process may have written it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from outrider.errors import Unavailable
from outrider.gateway.routers.routers import Router, RouterPool
from outrider.protocol.tokenizers import joined, sha256_of
from outrider.rpc.v1 import router_pb2
from outrider.user_cache import cache_directory, private_directory, write_whole

log = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 60.0


class TokenizerStore:
    """If the cache cannot be written, the gateway asks a router at each start."""

    def __init__(self, routers: RouterPool) -> None:
        self._routers = routers

    async def get(self, model: str, sha256: str) -> bytes:
        """A serialised Tokenizer with this hash. Raises Unavailable."""
        known = await asyncio.to_thread(_read, sha256)
        if known is not None:
            return known
        router = await self._routers.pick()
        try:
            data = await joined(_fetch(router, model, sha256), sha256)
        except grpc.aio.AioRpcError as error:
            self._routers.failed(router)
            raise Unavailable(f"tokenizer: {error.details() or error.code().name}", reason="NO_TOKENIZER") from error
        await asyncio.to_thread(_keep, sha256, data)
        log.info("the tokenizer of %s came from router %s: %d bytes", model, router.address, len(data))
        return data


async def _fetch(router: Router, model: str, sha256: str) -> AsyncIterator[bytes]:
    request = router_pb2.GetTokenizerRequest(model=model, tokenizer_sha256=sha256)
    async for part in router.stub.GetTokenizer(request, timeout=_FETCH_TIMEOUT_S, metadata=router.credential):
        yield part.chunk


def _file(sha256: str) -> Path:
    return cache_directory() / "tokenizers" / sha256


def _read(sha256: str) -> bytes | None:
    try:
        data = _file(sha256).read_bytes()
    except OSError:
        return None
    return data if sha256_of(data) == sha256 else None


def _keep(sha256: str, data: bytes) -> None:
    try:
        write_whole(private_directory(_file(sha256).parent) / sha256, data)
    except OSError as error:
        log.info("tokenizers are asked for again at the next start: %s", error)
