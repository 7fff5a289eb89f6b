"""python -m benchmarks placement"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc
import psutil
from outrider.metadata import MetadataStore
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, sequence_pb2, worker_pb2
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack_options import run_async
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.process import running_router

from benchmarks import report
from benchmarks.arms import turns
from benchmarks.scenarios.placement_real import real_targets
from benchmarks.support.caching_target import CachingTarget, StepTimes
from benchmarks.support.redis_server import EmbeddedServer
from tests.fakes import serving_target

_MODEL = "paced"
_SYSTEM_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 512, 32, 48
_MIN_SPEEDUP, _MIN_HIT_RATE = 1.8, 0.9
_SETTLE_S, _FIND_TIMEOUT_S = 3.0, 30.0


@dataclass(slots=True)
class Fleet:
    """One router and its targets, kept busy by a number of streams."""

    targets: list[CachingTarget]
    stub: router_pb2_grpc.RouterServiceAsyncStub
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask_for_ever()) for _ in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_for_ever(self) -> None:
        while True:
            await self.ask()

    async def ask(self) -> None:
        """Sends one request: the shared system prompt and a few tokens of its own."""
        number = next(self.numbers)
        own = [1 + (number * 31 + i * 17) % 60_000 for i in range(_OWN_TOKENS)]
        request = router_pb2.RouteRequest(
            request_id=f"r{number}",
            tenant="default",
            model=_MODEL,
            prompt_token_ids=[*range(1, 1 + _SYSTEM_TOKENS), *own],
            sampling=sequence_pb2.Sampling(top_p=1.0),
            stopping=sequence_pb2.Stopping(max_new_tokens=_ANSWER_TOKENS),
            speculation=router_pb2.SPECULATION_MODE_OFF,
        )
        call: Any = self.stub.RouteMany()
        await call.write(router_pb2.RouteManyRequest(calls=[router_pb2.RouteCall(call_id=1, request=request)]))
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.errors:
                raise RuntimeError(f"a request failed: {message.errors[0]}")
            if any(response.finish_reason for response in message.responses):
                break
        call.cancel()

    def counts(self) -> Counts:
        return Counts(
            tokens=sum(target.num_committed for target in self.targets),
            cached=sum(target.num_cached_tokens for target in self.targets),
            prompt=sum(target.num_prompt_tokens for target in self.targets),
            opened=[target.num_opened for target in self.targets],
        )


@dataclass(frozen=True, slots=True)
class Counts:
    tokens: int
    cached: int
    prompt: int
    opened: list[int]


@dataclass(frozen=True, slots=True)
class Block:
    """One fleet's turn."""

    tokens_per_s: float
    hit_rate: float
    """Share of the prompt tokens that were in a prefix cache."""
    shares: list[float]
    """Share of the sequences, by target."""


@click.command("placement")
@click.option("--streams", type=click.IntRange(1, 512), default=32, show_default=True)
@click.option("--blocks", type=click.IntRange(1, 100), default=6, show_default=True, help="Turns of each fleet.")
@click.option("--seconds", type=click.FloatRange(1), default=15.0, show_default=True, help="Of each turn.")
@click.option("--real", is_flag=True, help="Two real targets with a tiny model; only their shares are measured.")
@json_file_option
def placement(streams: int, blocks: int, seconds: float, real: bool, json_file: Path | None) -> int:
    """Are two targets twice as fast as one, when all requests begin alike?

    Paced targets, whose steps take 10 ms, 5 ms more for each row and 0.1 ms more for each uncached token of a prompt,
    behind a real router and Redis, all in this process. One request warms one target up; then all streams ask with one
    system prompt. One target and two take turns.

    With --real two real targets behind a real gateway, and four answers to each stream: each target has to get 35 to
    65 % of the sequences. --blocks and --seconds do not count there.
    """
    if real:
        return run_async(real_targets(streams, json_file))
    return run_async(_placement(streams, blocks, seconds, json_file))


async def _placement(streams: int, blocks: int, seconds: float, json_file: Path | None) -> int:
    found: dict[str, list[Block]] = {"1": [], "2": []}
    before = psutil.cpu_times()
    async with AsyncExitStack() as stack:
        fleets = {name: await stack.enter_async_context(_fleet(int(name))) for name in found}
        for _, name in turns(blocks, list(found)):
            found[name].append(await _turn(fleets[name], streams, seconds))
            note(f"{name} target(s): {found[name][-1].tokens_per_s:.0f} tokens/s")
    after = psutil.cpu_times()
    host_s = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    one, two = ([block.tokens_per_s for block in found[name]] for name in found)
    low, ratio, high = _ratio(one, two)
    hit_rate = statistics.median(block.hit_rate for block in found["2"])
    present = statistics.median(block.hit_rate for block in found["1"])
    holds = ratio >= _MIN_SPEEDUP and hit_rate >= _MIN_HIT_RATE * present
    shares = [round(statistics.median(shares), 3) for shares in zip(*(b.shares for b in found["2"]), strict=True)]
    rows = [
        {"targets": name, "tokens/s": f"{statistics.median(b.tokens_per_s for b in taken):.0f}",
         "prefix hit rate": f"{statistics.median(b.hit_rate for b in taken):.3f}"}
        for name, taken in found.items()
    ]  # fmt: skip
    report.show(
        report.table(rows),
        f"two against one: {ratio:.2f} (90 %: {low:.2f} to {high:.2f}); shares of the sequences: {shares}; "
        f"CPU time that the host took: {host_s:.1f} s",
    )
    body = {"holds": holds, "speedup": ratio, "interval": [low, high], "hit_rate": hit_rate, "hit_rate_of_one": present}
    return report.finish("placement", {**body, "shares": shares, "host_s": host_s}, json_file)


async def _turn(fleet: Fleet, streams: int, seconds: float) -> Block:
    async with fleet.running(streams):
        await asyncio.sleep(_SETTLE_S)
        before, started_s = fleet.counts(), time.monotonic()
        await asyncio.sleep(seconds)
        after, took_s = fleet.counts(), time.monotonic() - started_s
    opened = [b - a for a, b in zip(before.opened, after.opened, strict=True)]
    return Block(
        tokens_per_s=(after.tokens - before.tokens) / took_s,
        hit_rate=(after.cached - before.cached) / max(1, after.prompt - before.prompt),
        shares=[count / max(1, sum(opened)) for count in opened],
    )


@asynccontextmanager
async def _fleet(num_targets: int) -> AsyncIterator[Fleet]:
    """A fleet after one warm-up request."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await asyncio.to_thread(EmbeddedServer.start, directory)
        stack.callback(server.stop)
        store = await stack.enter_async_context(MetadataStore.connect(server.url))
        targets = [await stack.enter_async_context(_leased(store)) for _ in range(num_targets)]
        router = await stack.enter_async_context(running_router(RouterConfig(ops_listen=""), store))
        channel = await stack.enter_async_context(create_channel(router.address))
        fleet = Fleet(targets, router_pb2_grpc.RouterServiceStub(channel))
        async with asyncio.timeout(_FIND_TIMEOUT_S):
            while not await _sees(fleet, num_targets):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await fleet.ask()
        yield fleet


async def _sees(fleet: Fleet, num_targets: int) -> bool:
    with suppress(grpc.aio.AioRpcError):
        models = (await fleet.stub.ListModels(router_pb2.ListModelsRequest())).models
        return any(model.num_targets == num_targets for model in models)
    return False


@asynccontextmanager
async def _leased(store: MetadataStore) -> AsyncIterator[CachingTarget]:
    publishing: set[asyncio.Task[None]] = set()

    def publish(hashes: list[bytes]) -> None:
        task = asyncio.create_task(store.publish_prefix(worker_pb2.WORKER_ROLE_TARGET, target.info.worker_id, hashes))
        publishing.add(task)
        task.add_done_callback(publishing.discard)

    target = CachingTarget(StepTimes(), publish, model=_MODEL, max_sequences=256)
    async with (
        serving_target(target),
        store.register(target.info, target.address, lambda: target.load),
    ):
        yield target


def _ratio(below: Sequence[float], above: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of the medians, between the bounds of its 90 % bootstrap interval."""
    draw = random.Random(0)
    drawn = sorted(
        statistics.median(draw.choices(above, k=len(above))) / statistics.median(draw.choices(below, k=len(below)))
        for _ in range(draws)
    )
    return drawn[draws // 20], statistics.median(above) / statistics.median(below), drawn[-draws // 20]
