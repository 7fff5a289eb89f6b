"""The served models with their tokenizers, which targets send through a router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import grpc

from outrider.errors import Unavailable, UnknownModel
from outrider.gateway.routers.routers import Router, RouterPool
from outrider.gateway.tokenizer.model import BY_TEMPLATE, ModelTokenizer, Parsers
from outrider.protocol.tokenizers import joined
from outrider.rpc.v1 import router_pb2

log = logging.getLogger(__name__)
_LIST_TIMEOUT_S = 2.0
_MIN_REFRESH_S = 0.2
_RETRY_LOAD_S = 10.0
_POLL_S = 0.5

_FETCH_TIMEOUT_S = 60.0


async def _fetch(router: Router, model: str, sha256: str) -> AsyncIterator[bytes]:
    request = router_pb2.GetTokenizerRequest(model=model, tokenizer_sha256=sha256)
    async for part in router.stub.GetTokenizer(request, timeout=_FETCH_TIMEOUT_S, metadata=router.credential):
        yield part.chunk


@dataclass(frozen=True, slots=True)
class Model:
    """One served model and how it reads and writes text."""

    name: str
    max_context_len: int
    """Prompt and output together, in tokens."""
    vocab_size: int
    tokenizer: ModelTokenizer


_Tokenizer: TypeAlias = tuple[str, str]
"""Model, and hash of its tokenizer: a target that starts later may have another tokenizer."""


@dataclass(slots=True)
class _Loading:
    task: asyncio.Task[ModelTokenizer]
    started_s: float


@dataclass(slots=True)
class Catalog:
    """What the routers serve, as of the last `refresh`."""

    routers: RouterPool
    parsers: Callable[[str], Parsers] = lambda model: BY_TEMPLATE
    takes_defaults: bool = True
    """Whether models' own sampling defaults count."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Wall clock, for listings."""
    target_wait_s: float = 300.0
    """How long requests wait for a model that no target serves any more."""
    router_wait_s: float = 30.0
    """How long requests wait while no router answers."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _served: dict[str, router_pb2.ServedModel] = field(default_factory=dict)
    _live: frozenset[str] = frozenset()
    _last_live_s: dict[str, float] = field(default_factory=dict)
    _answered_s: float = float("-inf")
    _loading: dict[_Tokenizer, _Loading] = field(default_factory=dict)
    _refreshed_s: float = float("-inf")
    _refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def live(self) -> list[router_pb2.ServedModel]:
        """Models that some live target served at the last refresh."""
        return [self._served[name] for name in sorted(self._live)]

    @property
    def ready(self) -> list[str]:
        """Names of the live models whose tokenizers are loaded: requests for them start at once."""
        return sorted(self._live & self._readable)

    @property
    def awaited(self) -> list[str]:
        """Names of models that were ready recently: requests for them wait for a target or a router."""
        now_s = self.clock()
        if now_s - self._answered_s > self.router_wait_s:
            return []
        recent = {name for name, live_s in list(self._last_live_s.items()) if now_s - live_s <= self.target_wait_s}
        return sorted((recent - self._live) & self._readable)

    @property
    def _readable(self) -> set[str]:
        return {model for (model, _), loading in list(self._loading.items()) if _loaded(loading.task)}

    def sampling_defaults(self, served: router_pb2.ServedModel) -> Mapping[str, float]:
        """Those of a model that is ready; empty of any other."""
        loading = self._loading.get((served.model, served.tokenizer_sha256))
        return loading.task.result().sampling_defaults if loading is not None and _loaded(loading.task) else {}

    async def refresh(self) -> None:
        """Asks the routers. When none answers, the last known models stay, but none counts as live."""
        async with self._refreshing:
            if self.clock() - self._refreshed_s < _MIN_REFRESH_S:
                return
            answers = await asyncio.gather(*(_ask(router) for router in await self.routers.every()))
            known = [answer for answer in answers if answer is not None]
            found = {model.model: model for answer in known for model in answer.models}
            back = found.keys() - self._live
            self._served.update(found)
            self._live = frozenset(found)
            self._refreshed_s = now_s = self.clock()
            self._last_live_s.update(dict.fromkeys(found, now_s))
            if known:
                self._answered_s = now_s
            self._await({model.model: model for answer in known for model in answer.awaited_models}, now_s)
        for served in found.values():
            if served.tokenizer_sha256:
                self._load(served, anew=served.model in back)
        self._forget()

    def _await(self, awaited: Mapping[str, router_pb2.ServedModel], now_s: float) -> None:
        """Models that a router has seen and this gateway has not, because it started later."""
        for name in awaited.keys() - self._served.keys():
            self._served[name] = awaited[name]
            self._last_live_s[name] = now_s
            if awaited[name].tokenizer_sha256:
                self._load(awaited[name])

    async def get(self, name: str) -> Model:
        """Raises UnknownModel for a model that no target serves, Unavailable without a router or its tokenizer.

        A model that was served before stays known while it has no target: the router waits for one. A gateway that has
        just started waits for its first answer of a router, and for a tokenizer, as long as requests wait elsewhere.
        """
        served = await self._known(name)
        return Model(name, served.max_context_len, served.vocab_size, await self._tokenizer(served))

    async def _known(self, name: str) -> router_pb2.ServedModel:
        give_up_s = self.clock() + self.router_wait_s
        while name not in self._served:
            await self.refresh()
            if name in self._served:
                break
            if self._live:
                raise UnknownModel(name)
            if self.clock() >= give_up_s:
                raise Unavailable("no model is served at the moment", reason="NO_MODEL", retry_after_s=1.0)
            await self.sleep(_POLL_S)
        return self._served[name]

    async def close(self) -> None:
        tasks = [loading.task for loading in self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tokenizer(self, served: router_pb2.ServedModel) -> ModelTokenizer:
        if not served.tokenizer_sha256:
            message = f"the targets of {served.model!r} have no tokenizer that a gateway could use"
            raise Unavailable(message, reason="NO_TOKENIZER")
        give_up_s = self.clock() + self.target_wait_s
        while True:
            try:
                # Shielded, because a client that leaves must not cancel the loading for others.
                return await asyncio.shield(self._load(served).task)
            except (Unavailable, ValueError) as error:
                if served.model in self._live or self.clock() >= give_up_s:
                    message = f"the tokenizer of {served.model!r} is not available at this gateway"
                    raise Unavailable(message, reason="TOKENIZER_UNAVAILABLE", retry_after_s=_RETRY_LOAD_S) from error
            # A target that comes back has it.
            await self.sleep(_POLL_S)
            await self.refresh()
            served = self._served[served.model]

    def _load(self, served: router_pb2.ServedModel, *, anew: bool = False) -> _Loading:
        """`anew`: one that failed is tried again at once."""
        key = served.model, served.tokenizer_sha256
        known = self._loading.get(key)
        now_s = time.monotonic()
        due = anew or (known is not None and now_s - known.started_s > _RETRY_LOAD_S)
        if known is not None and not (_failed(known.task) and due):
            return known
        loading = self._loading[key] = _Loading(asyncio.create_task(self._fetched(*key)), now_s)
        loading.task.add_done_callback(lambda task: _report(served.model, task))
        return loading

    async def _fetched(self, model: str, sha256: str) -> ModelTokenizer:
        data = await self._asked(model, sha256)
        tokenizer = await asyncio.to_thread(ModelTokenizer.parse, data, self.parsers(model))
        for remark in tokenizer.view.remarks:
            log.warning("chat template of %s: %s", model, remark)
        return tokenizer if self.takes_defaults else replace(tokenizer, sampling_defaults={})

    async def _asked(self, model: str, sha256: str) -> bytes:
        """A serialised Tokenizer with this hash. Raises Unavailable."""
        router = await self.routers.pick()
        try:
            data = await joined(_fetch(router, model, sha256), sha256)
        except grpc.aio.AioRpcError as error:
            self.routers.failed(router)
            raise Unavailable(f"tokenizer: {error.details() or error.code().name}", reason="NO_TOKENIZER") from error
        log.info("the tokenizer of %s came from router %s: %d bytes", model, router.address, len(data))
        return data

    def _forget(self) -> None:
        """Tokenizers that no target has any more."""
        current = {(served.model, served.tokenizer_sha256) for served in self._served.values()}
        for key in [key for key, loading in self._loading.items() if key not in current and loading.task.done()]:
            del self._loading[key]


async def _ask(router: Router) -> router_pb2.ListModelsResponse | None:
    try:
        return await router.stub.ListModels(
            router_pb2.ListModelsRequest(), timeout=_LIST_TIMEOUT_S, metadata=router.credential
        )
    except grpc.aio.AioRpcError:
        return None


def _loaded(task: asyncio.Task[ModelTokenizer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _failed(task: asyncio.Task[ModelTokenizer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _report(name: str, task: asyncio.Task[ModelTokenizer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("tokenizer of %s cannot be loaded: %s", name, error)
