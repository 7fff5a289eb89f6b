"""Which models a gateway can answer for, and when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.errors import Unavailable, UnknownModel
from outrider.gateway.tokenizer.catalog import Catalog
from outrider.protocol.tokenizers import MAX_TOKENIZER_BYTES, joined, sha256_of
from outrider.rpc.v1 import router_pb2

from tests.integration.gateway.scripted_router import tiny_tokenizer_bytes

MODEL = "m"


@dataclass
class Routers:
    """A pool with one router, as a catalog sees it."""

    models: list[router_pb2.ServedModel] = field(default_factory=list)
    awaited: list[router_pb2.ServedModel] = field(default_factory=list)
    send: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    away: bool = False

    async def every(self) -> list[Any]:
        return [] if self.away else [await self.pick()]

    async def pick(self) -> Any:
        stub = SimpleNamespace(ListModels=self._list_models, GetTokenizer=self._get_tokenizer)
        return SimpleNamespace(stub=stub, credential=(), address="a router")

    async def _list_models(self, request: Any, timeout: float, metadata: object) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=self.models, awaited_models=self.awaited)

    async def _get_tokenizer(
        self, request: Any, timeout: float, metadata: object
    ) -> AsyncIterator[router_pb2.GetTokenizerResponse]:
        self.num_asked += 1
        await self.send.wait()
        # Only a live target has it.
        yield router_pb2.GetTokenizerResponse(chunk=tiny_tokenizer_bytes() if self.models else b"")


def served(sha256: str) -> router_pb2.ServedModel:
    return router_pb2.ServedModel(model=MODEL, max_context_len=64, vocab_size=384, tokenizer_sha256=sha256)


async def refreshed(catalog: Catalog) -> list[str]:
    catalog._refreshed_s = float("-inf")
    await catalog.refresh()
    return catalog.ready


async def test_a_model_is_ready_once_its_tokenizer_has_come() -> None:
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


async def test_a_model_that_was_ready_is_awaited_for_as_long_as_requests_wait() -> None:
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


async def test_a_tokenizer_that_fails_is_left_alone_for_a_while_and_another_one_is_asked_for_at_once() -> None:
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


@dataclass
class Later:
    """Sleeps that take no time, and what happens meanwhile."""

    at_s: float
    happens: Callable[[], None]
    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        before_s, self.now_s = self.now_s, self.now_s + delay_s
        if before_s < self.at_s <= self.now_s:
            self.happens()
        await asyncio.sleep(0)


@pytest.mark.parametrize("away", [True, False])
async def test_a_gateway_that_has_just_started_waits_for_a_router_and_for_the_first_model(away: bool) -> None:
    routers = Routers(away=away)
    routers.send.set()

    def arrive() -> None:
        routers.away = False
        routers.models.append(served(sha256_of(tiny_tokenizer_bytes())))

    time = Later(20, arrive)
    catalog = Catalog(routers, router_wait_s=30, clock=time.clock, sleep=time.sleep)  # type: ignore[arg-type]
    assert (await catalog.get(MODEL)).vocab_size == 384
    assert 20 <= time.now_s < 22
    with pytest.raises(UnknownModel):
        await catalog.get("another")
    await catalog.close()


async def test_it_gives_up_when_requests_elsewhere_do() -> None:
    time = Later(math.inf, lambda: None)
    catalog = Catalog(Routers(away=True), router_wait_s=30, clock=time.clock, sleep=time.sleep)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="no model is served") as caught:
        await catalog.get(MODEL)
    assert (caught.value.reason, caught.value.retry_after_s) == ("NO_MODEL", 1.0)
    assert 30 <= time.now_s < 32


@pytest.mark.parametrize("back_s", [200, 400])
async def test_it_waits_for_the_tokenizer_of_a_model_whose_only_target_restarts(back_s: float) -> None:
    model = served(sha256_of(tiny_tokenizer_bytes()))
    routers = Routers(awaited=[model])
    routers.send.set()
    time = Later(back_s, lambda: routers.models.append(model))
    catalog = Catalog(routers, target_wait_s=300, clock=time.clock, sleep=time.sleep)  # type: ignore[arg-type]
    if back_s < 300:
        assert (await catalog.get(MODEL)).vocab_size == 384
        assert back_s <= time.now_s < back_s + 2
    else:
        with pytest.raises(Unavailable, match="not available at this gateway"):
            await catalog.get(MODEL)
    await catalog.close()


async def test_what_never_ends_is_no_tokenizer() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield bytes(MAX_TOKENIZER_BYTES // 4)

    with pytest.raises(Unavailable, match="more than"):
        await joined(chunks(), "0" * 64)
