"""What tokens stand for, so that the console shows text. From targets, through a router, when first asked for."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from typing import Any

from google.protobuf.message import DecodeError
from outrider.errors import OutriderError
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import tokenizer_pb2
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.token_bytes import TokenBytes

from outrider_controller.control.api.routers import Routers

log = logging.getLogger(__name__)

# A large vocabulary takes 20 MiB.
_NUM_KEPT = 4
# The console waits this long, and then shows ids until the vocabulary is there.
_PATIENCE_S = 1.5


class ConsoleVocabulary:
    """Keeps those of the models that were looked at last."""

    def __init__(self, leases: MetadataStore, routers: Routers) -> None:
        self._leases = leases
        self._routers = routers
        self._tables: OrderedDict[str, asyncio.Task[TokenBytes | None]] = OrderedDict()

    async def of(self, model: str) -> TokenBytes | None:
        """None where no live target of this model has one that can be read. Raises TimeoutError while it comes."""
        targets = await self._leases.workers(worker.WORKER_ROLE_TARGET)
        sha256 = next((one.info.tokenizer_sha256 for one in targets if one.info.model == model), "")
        if not sha256:
            return None
        if (task := self._tables.get(sha256)) is None:
            task = self._tables[sha256] = asyncio.create_task(self._fetch(model, sha256))
        self._tables.move_to_end(sha256)
        while len(self._tables) > _NUM_KEPT:
            self._tables.popitem(last=False)[1].cancel()
        async with asyncio.timeout(_PATIENCE_S):
            table = await asyncio.shield(task)
        if table is None:
            self._tables.pop(sha256, None)
        return table

    async def _fetch(self, model: str, sha256: str) -> TokenBytes | None:
        try:
            return await asyncio.to_thread(read, await self._routers.tokenizer(model, sha256))
        except (OutriderError, ValueError) as error:
            log.info("the console shows tokens of %s by their ids: %s", model, error)
            return None


def read(data: bytes) -> TokenBytes:
    """The bytes of every token of a serialised Tokenizer; special ones by their names. Raises ValueError."""
    try:
        spec = json.loads(tokenizer_pb2.Tokenizer.FromString(data).json)
        pieces: dict[int, str] = _pieces(spec["model"]["vocab"])
        pieces |= {added["id"]: added["content"] for added in spec.get("added_tokens", ())}
        highest = max(pieces, default=-1)
        return TokenBytes.build([pieces.get(i) for i in range(highest + 1)], spec.get("decoder"), ())
    except (DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"tokenizer: {error!r}") from error


def _pieces(vocab: Any) -> dict[int, str]:
    """Unigram models list them with their scores, all others name the id of each."""
    if isinstance(vocab, dict):
        return {number: piece for piece, number in vocab.items()}
    return {number: piece for number, (piece, _) in enumerate(vocab)}
