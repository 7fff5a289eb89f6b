"""Peers that lie: a real one answers, and some of its answers are changed on their way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe
from outrider.draft.process import serve as serve_draft
from outrider.drafters.head import HeadDrafter
from outrider.drafters.loading import load_drafter
from outrider.errors import OutriderError
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, policy_pb2, router_pb2, router_pb2_grpc, sequence_pb2, target_pb2
from outrider.target.config import TargetConfig
from outrider.target.process import load
from outrider.target.process import serve as serve_target
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.server import running_control
from outrider_controller.router.config import FailoverConfig, RouterConfig
from outrider_controller.router.process import running_router

from tests.integration.gateway.scripted_router import until
from tests.redis_server import EmbeddedServer
from tests.route_call import RouteCall
from tests.soak.mutations import directed, mutated
from tests.soak.rpc_services import ENGINE, MODEL
from tests.unit.target.test_head_drafts import random_head

LIED_TO = "lied-to"
"""The model of the target that lies."""
_ANSWERS: Mapping[str, type[Any]] = {
    "Verify": target_pb2.VerifyResponse,
    "Draft": draft_pb2.DraftResponse,
    "Follow": policy_pb2.FollowResponse,
}
_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class Liar(grpc.GenericRpcHandler):
    """Passes calls on to a real peer, whose streams it falsifies."""

    rng: random.Random
    share: float = 0.0
    """Of the messages, which it changes."""
    upstream: str = ""
    address: str = ""
    num_answers: int = 0
    """Of the peer, that it could have changed."""
    num_lies: int = 0

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            async with create_channel(self.upstream) as channel:
                call: Any = channel.stream_stream(method)()
                passing = asyncio.create_task(_passed(requests, call))
                try:
                    while (data := await call.read()) is not grpc.aio.EOF:
                        for said in self._said(method.rpartition("/")[2], data):
                            await context.write(said)
                    context.set_code(await call.code())
                    context.set_details(await call.details())
                finally:
                    passing.cancel()
                    call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)

    def _said(self, method: str, data: bytes) -> Iterator[bytes]:
        self.num_answers += method in _ANSWERS
        if method not in _ANSWERS or self.rng.random() >= self.share:
            yield data
            return
        self.num_lies += 1
        truth = _ANSWERS[method].FromString(data)
        if self.rng.random() < 0.3 and (edges := list(directed([truth]))):
            yield self.rng.choice(edges)
        else:
            yield next(mutated([truth], self.rng))
        if self.rng.random() < 0.3:
            # Also what was true comes, late, and twice.
            yield from (data, data)


async def _passed(requests: AsyncIterator[bytes], call: Any) -> None:
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        async for data in requests:
            await call.write(data)
        await call.done_writing()


@asynccontextmanager
async def lying(seed: str) -> AsyncIterator[Liar]:
    server, liar = grpc.aio.server(), Liar(random.Random(seed))
    server.add_generic_rpc_handlers((liar,))
    liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield liar
    finally:
        await server.stop(0)


@dataclass(frozen=True, slots=True)
class Lied:
    """A router among liars: the target of one model, both draft workers, and the control plane."""

    router: str
    liars: Mapping[str, Liar]


@asynccontextmanager
async def among_liars(directory: Path, seed: int) -> AsyncIterator[Lied]:
    tiny = tiny_checkpoint(directory / "tiny")
    with EmbeddedServer.start(directory / "redis") as redis:
        async with AsyncExitStack() as stack:
            liars = {
                name: await stack.enter_async_context(lying(f"{seed} {name}"))
                for name in ("target", "draft", "head", "control")
            }
            common: dict[str, Any] = {"model": str(tiny), "listen": "127.0.0.1:0", "engine": ENGINE}
            common["metadata_url"] = redis.url

            honest = TargetConfig(**common, model_name=MODEL)
            await stack.enter_async_context(serve_target(honest, *load(honest)))
            false = TargetConfig(**common, model_name=LIED_TO, advertise=liars["target"].address)
            target = await stack.enter_async_context(serve_target(false, *load(false)))
            liars["target"].upstream = target.life.address

            for name in ("draft", "head"):
                config = DraftConfig(**common, advertise=liars[name].address)
                drafter: Any = load_drafter(tiny, engine=ENGINE, model=config.drafting)
                if name == "head":
                    drafter = HeadDrafter(random_head("mtp", tiny), 384, 512, 64, "cpu")
                info = describe(config, tiny, drafter)
                draft = await stack.enter_async_context(serve_draft(config, drafter, info))
                liars[name].upstream = draft.life.address

            store = await stack.enter_async_context(MetadataStore.connect(redis.url))
            control_config = ControlConfig(advertise=liars["control"].address)
            control = await stack.enter_async_context(running_control(control_config, store))
            liars["control"].upstream = control.address
            router_config = RouterConfig(failover=FailoverConfig(wait_for_target_s=0.2))
            router = await stack.enter_async_context(running_router(router_config, store))
            # On a busy machine the control plane leads later than the router asks it first.
            await until(lambda: liars["control"].num_answers > 0)
            yield Lied(router.address, liars)


async def ask(stub: Any, model: str, number: int) -> list[int]:
    """Raises OutriderError; TimeoutError where there is no answer."""
    sampling = sequence_pb2.Sampling(top_p=1)
    if number % 2:
        sampling = sequence_pb2.Sampling(temperature=0.8, top_p=0.95, seed=7)
    request = router_pb2.RouteRequest(
        request_id=f"{model}-{number}",
        model=model,
        prompt_token_ids=[11, 12, 13, 14],
        sampling=sampling,
        seeded=bool(number % 2),
        stopping=sequence_pb2.Stopping(max_new_tokens=24),
        max_draft_tokens=3,
        speculation=router_pb2.SPECULATION_MODE_ON,
    )
    async with asyncio.timeout(_TIMEOUT_S):
        return [token async for each in RouteCall(stub, request, _TIMEOUT_S) for token in each.token_ids]


@dataclass(slots=True)
class Answers:
    innocent: set[tuple[bool, tuple[int, ...]]] = field(default_factory=set)
    """Of the target that does not lie: whether it was sampled, and what it said."""
    num_ended: int = 0
    """Of those of the target that lies."""
    num_failed: int = 0
    """With an error."""


async def answers(lied: Lied, num_requests: int, at_once: int = 8) -> Answers:
    """So many of each model."""
    async with create_channel(lied.router) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        found, turn = Answers(), asyncio.Semaphore(at_once)

        async def one(number: int) -> None:
            async with turn:
                found.innocent.add((bool(number % 2), tuple(await ask(stub, MODEL, number))))
                try:
                    await ask(stub, LIED_TO, number)
                except OutriderError:
                    found.num_failed += 1
                found.num_ended += 1

        async with asyncio.TaskGroup() as group:
            for number in range(num_requests):
                group.create_task(one(number))
        return found
