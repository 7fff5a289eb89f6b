"""python -m tests.soak bill: do the tenants' bills add up to what the workers spent?

Two targets and a draft of tiny models in this process, whose counters can be read; routers in processes of their own; a
real Redis. First a thousand requests: some leave, and now and then a target gives all it has back. Then a router is
killed under a steady load.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from outrider.errors import OutriderError
from outrider.runtime.spawn import bound_to_us
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import columns

from tests.bills import billed, spent
from tests.route_call import RouteCall
from tests.soak.soak import make_request, start_draft, start_target

if TYPE_CHECKING:
    from outrider.draft.service import DraftServicer
    from outrider.metadata import MetadataStore
    from outrider.rpc.v1 import router_pb2_grpc
    from outrider.target.requests.service import TargetServicer
    from outrider.worker.loop import StepLoop

_TENANTS, _ROUTERS, _NUM_BLOCKS = 7, 2, 512
_CONCURRENCY, _GIVEN_BACK_EVERY = 24, 50
_ALLOWED = 0.005
_WRITE_EVERY_S, _MARGIN_S = 10.0, 1.0
_FIRST_HOUR, _LAST_HOUR = 0, 1 << 31


@dataclass(slots=True)
class _Fleet:
    url: str
    store: MetadataStore
    targets: list[TargetServicer]
    drafts: list[DraftServicer]
    chance: random.Random

    def spent(self) -> dict[str, float]:
        return spent([t.stats for t in self.targets], [d.stats for d in self.drafts])

    async def billed(self) -> dict[str, float]:
        return billed(entry.usage for entry in await self.store.ledger.read(_FIRST_HOUR, _LAST_HOUR))

    async def idle(self) -> None:
        """Returns once nothing is open on any worker, nor on its way."""
        steps: list[StepLoop[Any, Any]] = [*(t.steps for t in self.targets), *(d.steps for d in self.drafts)]
        while any(one.load.num_sequences for one in steps):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)


@dataclass(slots=True)
class _Router:
    process: asyncio.subprocess.Process
    stub: router_pb2_grpc.RouterServiceAsyncStub

    async def stop(self) -> None:
        self.process.terminate()
        await self.process.wait()


@click.command("bill")
@click.option("-n", "--num-requests", type=click.IntRange(50), default=1000, show_default=True)
@click.option("--kill-after", type=click.FloatRange(15), default=25.0, show_default=True, help="Seconds; a router's.")
@click.option("--seed", type=int, default=0, show_default=True)
def bill(num_requests: int, kill_after: float, seed: int) -> int:
    """Requests that end, leave and move, and a router that is killed: is the sum of bills what the workers spent?"""
    return ExitCode.OK if asyncio.run(_run(num_requests, kill_after, seed)) else ExitCode.ERROR


async def _run(num_requests: int, kill_after_s: float, seed: int) -> bool:
    async with _fleet(seed) as fleet:
        async with AsyncExitStack() as stack:
            routers = [await stack.enter_async_context(_router(fleet)) for _ in range(_ROUTERS)]
            left, moved = await _requests(fleet, routers, num_requests)
            await fleet.idle()
        click.echo(f"{num_requests} requests over {_ROUTERS} routers: {left} left, {moved} times all of a target moved")
        holds = _compare(await fleet.billed(), fleet.spent())
        return await _killed(fleet, kill_after_s) and holds


async def _requests(fleet: _Fleet, routers: list[_Router], count: int) -> tuple[int, int]:
    numbers, num_left, num_moved = iter(range(count)), 0, 0

    async def client() -> None:
        nonlocal num_left, num_moved
        for number in numbers:
            left = await _ask(fleet.chance.choice(routers), number, fleet.chance)
            num_left += left
            if number % _GIVEN_BACK_EVERY == _GIVEN_BACK_EVERY - 1:
                fleet.chance.choice(fleet.targets).expire_drain()
                num_moved += 1

    await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))
    return num_left, num_moved


async def _ask(router: _Router, number: int, chance: random.Random) -> bool:
    """Whether its client left."""
    request, leaves_after = make_request(number, chance)
    request.tenant = f"tenant-{number % _TENANTS}"
    call, received = RouteCall(router.stub, request, 60.0), 0
    with suppress(OutriderError):
        async for response in call:
            received += len(response.token_ids)
            if leaves_after is not None and received >= leaves_after:
                break
    call.cancel()
    return leaves_after is not None


def _compare(bills: Mapping[str, float], workers: Mapping[str, float]) -> bool:
    ratios = {name: bills[name] / workers[name] - 1 for name in workers}
    rows = [[name, f"{bills[name]:.0f}", f"{workers[name]:.0f}", f"{ratios[name]:+.3%}"] for name in workers]
    click.echo(columns(["", "BILLS", "WORKERS", "DIFFERENCE"], rows))
    return all(abs(ratio) <= _ALLOWED for ratio in ratios.values())


async def _killed(fleet: _Fleet, after_s: float) -> bool:
    """Whether a router that is killed takes no more than its last seconds with it."""
    bills, before = await fleet.billed(), fleet.spent()
    history: list[tuple[float, float]] = []
    async with _router(fleet) as router:

        async def client(number: int) -> NoReturn:
            while True:
                await _ask(router, number, fleet.chance)

        clients = [asyncio.create_task(client(number)) for number in range(_CONCURRENCY // 2)]
        started_s = time.monotonic()
        while time.monotonic() < started_s + after_s:
            history.append((time.monotonic(), fleet.spent()["target_us"]))
            await asyncio.sleep(0.1)
        router.process.kill()
        killed_s = time.monotonic()
        await router.process.wait()
        # One that has just asked anew would wait for the router to come back.
        for client_task in clients:
            client_task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    await fleet.idle()
    used = fleet.spent()["target_us"] - before["target_us"]
    lost = used - ((await fleet.billed())["target_us"] - bills["target_us"])
    since_s = killed_s - _WRITE_EVERY_S - _MARGIN_S
    allowed = fleet.spent()["target_us"] - max(at for second, at in history if second <= since_s)
    click.echo(f"a router killed after {after_s:g} s: {lost / 1e6:.2f} s of {used / 1e6:.2f} s of targets are lost;")
    click.echo(f"its last {_WRITE_EVERY_S + _MARGIN_S:g} s took {allowed / 1e6:.2f} s of them")
    return 0 < lost <= allowed


@asynccontextmanager
async def _fleet(seed: int) -> AsyncIterator[_Fleet]:
    import torch
    from outrider.engine import EngineConfig
    from outrider.metadata import MetadataStore
    from outrider.testing.tiny import tiny_checkpoint

    from benchmarks.support.redis_server import EmbeddedServer

    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bill-")))
        url = stack.enter_context(EmbeddedServer.start(directory / "redis")).url
        model = tiny_checkpoint(directory / "tiny", max_context_len=512)
        store = await stack.enter_async_context(MetadataStore.connect(url))
        config = EngineConfig(num_blocks=_NUM_BLOCKS, execution="native")
        targets = [(await start_target(stack, model, url, config))[1] for _ in range(2)]
        drafts = [await start_draft(stack, model, url, config)]
        yield _Fleet(url, store, targets, drafts, random.Random(seed))


@asynccontextmanager
async def _router(fleet: _Fleet) -> AsyncIterator[_Router]:
    from outrider.rpc.channel import create_channel
    from outrider.rpc.v1 import router_pb2_grpc, worker_pb2

    command = (sys.executable, "-m", "outrider_controller.router", "--metadata", fleet.url)
    process = await asyncio.create_subprocess_exec(*bound_to_us(command), stderr=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(60):
        while True:
            found = [r for r in await fleet.store.workers(worker_pb2.WORKER_ROLE_ROUTER) if r.pid == process.pid]
            if found:
                break
            await asyncio.sleep(0.1)
    async with create_channel(found[0].address) as channel:
        router = _Router(process, router_pb2_grpc.RouterServiceStub(channel))
        yield router
    if process.returncode is None:
        await router.stop()
