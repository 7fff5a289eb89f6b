"""Which models a gateway can answer for, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.errors import Unavailable
from outrider.gateway.catalog import Catalog
from outrider.protocol.tokenizers import MAX_TOKENIZER_BYTES, joined, sha256_of
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.scripted_router import tiny_tokenizer_bytes

MODEL = "m"


@dataclass
class Routers:
    """A pool with one router, as a catalog sees it."""

    models: list[router_pb2.ServedModel] = field(default_factory=list)
    send: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    away: bool = False

    async def every(self) -> list[Any]:
        return [] if self.away else [await self.pick()]

    async def pick(self) -> Any:
        stub = SimpleNamespace(ListModels=self._list_models, GetTokenizer=self._get_tokenizer)
        return SimpleNamespace(stub=stub, credential=(), address="a router")

    async def _list_models(self, request: Any, timeout: float, metadata: object) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=self.models)

    async def _get_tokenizer(
        self, request: Any, timeout: float, metadata: object
    ) -> AsyncIterator[router_pb2.GetTokenizerResponse]:
        self.num_asked += 1
        await self.send.wait()
        yield router_pb2.GetTokenizerResponse(chunk=tiny_tokenizer_bytes())


def served(sha256: str) -> router_pb2.ServedModel:
    return router_pb2.ServedModel(model=MODEL, max_context_len=64, vocab_size=384, tokenizer_sha256=sha256)


async def refreshed(catalog: Catalog) -> list[str]:
    catalog._refreshed_s = float("-inf")
    await catalog.refresh()
    return catalog.ready


async def test_a_model_is_ready_once_its_tokenizer_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    routers = Routers()
    catalog = Catalog(routers)  # type: ignore[arg-type]
    assert await refreshed(catalog) == []
    routers.models.append(served(sha256_of(tiny_tokenizer_bytes())))
    assert await refreshed(catalog) == []
    routers.send.set()
    assert (await catalog.get(MODEL)).vocab_size == 384
    assert await refreshed(catalog) == [MODEL]
    assert routers.num_asked == 1
    await catalog.close()


async def test_a_model_that_was_ready_is_awaited_for_as_long_as_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    routers, now_s = Routers(), [0.0]
    catalog = Catalog(routers, target_wait_s=300, router_wait_s=30, clock=lambda: now_s[0])  # type: ignore[arg-type]
    assert (await refreshed(catalog), catalog.awaited) == ([], [])
    routers.models.append(served(sha256_of(tiny_tokenizer_bytes())))
    routers.send.set()
    await refreshed(catalog)
    await catalog.get(MODEL)
    assert (await refreshed(catalog), catalog.awaited) == ([MODEL], [])
    del routers.models[:]
    for at_s, awaited in ((299, [MODEL]), (301, [])):
        now_s[0] = at_s
        assert (await refreshed(catalog), catalog.awaited) == ([], awaited)
    routers.models.append(served(sha256_of(tiny_tokenizer_bytes())))
    assert await refreshed(catalog) == [MODEL]
    routers.away = True
    for at_s, awaited in ((330, [MODEL]), (332, [])):
        now_s[0] = at_s
        assert (await refreshed(catalog), catalog.awaited) == ([], awaited)
    await catalog.close()


async def test_a_tokenizer_that_fails_is_left_alone_for_a_while_and_another_one_is_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    routers = Routers([served("0" * 64)])
    routers.send.set()
    catalog = Catalog(routers)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(Unavailable, match="not available at this gateway"):
            await catalog.get(MODEL)
    assert routers.num_asked == 1
    routers.models[0] = served(sha256_of(tiny_tokenizer_bytes()))
    await refreshed(catalog)
    assert (await catalog.get(MODEL)).tokenizer.eos_token_ids == (2,)
    await catalog.close()


async def test_what_never_ends_is_no_tokenizer() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MAX_TOKENIZER_BYTES // 4)

    with pytest.raises(Unavailable, match="more than"):
        await joined(chunks(), "0" * 64)
