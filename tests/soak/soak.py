"""python -m tests.soak soak"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil
from outrider.errors import OutriderError
from outrider.hardware import hardware
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, write_json

from benchmarks.support.lines import Line, least_squares
from benchmarks.support.progress import Progress
from tests.route_call import RouteCall

if TYPE_CHECKING:
    from outrider.draft.service import DraftServicer
    from outrider.engine import Engine, EngineConfig
    from outrider.rpc.v1 import router_pb2_grpc
    from outrider.target.service import TargetServicer
    from outrider_controller.router.process import RunningRouter

_MODEL = "tiny"
_CONTEXT = 512
_LONGEST_PROMPT, _LONGEST_ANSWER = 180, 60
# Prompts that begin alike, so that there is something to share, and to evict.
_BEGINNINGS, _BEGINNING_TOKENS = 12, 96
_CANCELLED = 0.2
_TIMEOUT_S = 300.0
_SETTLE_S = 20.0
_SAMPLES = 200
# Of the memory after the warm-up: what may be gained over all requests after it.
_GROWTH = 0.03

_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"sampling": sequence.Sampling(temperature=0, top_p=1)},
    {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95)},
    {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95, seed=3), "seeded": True},
)
_SPECULATION = (router.SPECULATION_MODE_ON, router.SPECULATION_MODE_AUTO, router.SPECULATION_MODE_OFF)


@dataclass(slots=True)
class Stay:
    """A fleet in this process: router, target and draft, each with its own server on loopback."""

    stub: router_pb2_grpc.RouterServiceAsyncStub
    router: RunningRouter
    target: TargetServicer
    draft: DraftServicer
    target_engine: Engine
    num_blocks: dict[str, int]

    @property
    def held(self) -> dict[str, int]:
        """KV blocks that are not free, by worker."""
        free = {"target": self.target.steps.load.num_free_blocks, "draft": self.draft.steps.load.num_free_blocks}
        return {name: self.num_blocks[name] - count for name, count in free.items()}

    @property
    def num_open(self) -> int:
        """Sequences and requests that have not ended."""
        return (
            len(self.router.dispatcher.table.requests)
            + self.target.steps.load.num_sequences
            + self.draft.steps.load.num_running
        )


@dataclass(slots=True)
class Soaked:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """complete, cancelled, short."""
    errors: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    rss: list[tuple[int, int]] = field(default_factory=list)
    """Requests ended, and bytes this process held then."""
    seconds: float = 0.0
    preemptions: int = 0
    evictions: int = 0
    """Cached blocks that had to make room in the target."""
    held: dict[str, int] = field(default_factory=dict)
    still_open: int = 0

    def as_dict(self) -> dict[str, Any]:
        # asdict copies a Counter as if its pairs were what it should count.
        counters = {"outcomes": dict(self.outcomes), "errors": dict(self.errors)}
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, **counters}


@click.command("soak")
@click.option("-n", "--num-requests", type=click.IntRange(100), default=10_000, show_default=True)
@click.option("--concurrency", type=click.IntRange(2, 256), default=24, show_default=True, help="Requests at once.")
@click.option("--num-blocks", type=click.IntRange(40), default=128, show_default=True, help="Of the target's KV pool.")
@click.option("--warm-up", type=click.FloatRange(0.05, 0.9), default=0.3, show_default=True, help="Share of requests.")
@click.option("--seed", type=int, default=0, show_default=True)
@json_file_option
def soak(
    num_requests: int, concurrency: int, num_blocks: int, warm_up: float, seed: int, json_file: Path | None
) -> int:
    """Thousands of requests that end, are cancelled and lose their KV: is everything given back?

    A tiny model; router, target and draft with their real servers on loopback, in this process. Prompts and answers of
    random length, greedy and sampled, one in five cancelled by its client; a KV pool so small that sequences lose
    their place and cached prefixes theirs, which must have happened. At the end every block must be free, and this
    process may hold no more memory than after the warm-up, but for 3 %.
    """
    soaked = asyncio.run(_soak(num_requests, concurrency, num_blocks, seed))
    growth = memory_growth(soaked.rss, int(num_requests * warm_up))
    found = problems(soaked, growth, num_requests - int(num_requests * warm_up))
    click.echo(_table(soaked, growth))
    for problem in found:
        click.echo(problem)
    body = {"holds": not found, "problems": found, "requests": num_requests, "concurrency": concurrency}
    more = {**soaked.as_dict(), "warm_up": warm_up, "num_blocks": num_blocks, "growth": asdict(growth)}
    write_json(json_file, "bench-soak", {**body, **more, "hardware": hardware()})
    return ExitCode.ERROR if found else ExitCode.OK


async def _soak(num_requests: int, concurrency: int, num_blocks: int, seed: int) -> Soaked:
    soaked = Soaked()
    rng = random.Random(seed)
    requests = iter([make_request(number, rng) for number in range(num_requests)])
    process, every = psutil.Process(), max(1, num_requests // _SAMPLES)
    async with staying(num_blocks) as stay:
        started_s = time.monotonic()
        report = Progress("requests", num_requests)

        async def client() -> None:
            for request, cancel_after in requests:
                await _ask(stay, request, cancel_after, soaked)
                ended = soaked.outcomes.total() + soaked.errors.total()
                report(ended, "")
                if ended % every == 0:
                    soaked.rss.append((ended, process.memory_info().rss))

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        soaked.seconds = round(time.monotonic() - started_s, 1)
        await _settled(stay)
        soaked.held, soaked.still_open = stay.held, stay.num_open
        soaked.preemptions = stay.target.stats.num_preemptions
        soaked.evictions = stay.target_engine.kv.num_evicted_blocks
    return soaked


def make_request(number: int, rng: random.Random) -> tuple[router.RouteRequest, int | None]:
    """A request, and after how many tokens its client leaves; None: it stays."""
    prompt = [rng.randrange(3, 259) for _ in range(rng.randint(1, _LONGEST_PROMPT))]
    if rng.random() < 0.5:
        shared = random.Random(rng.randrange(_BEGINNINGS))
        beginning = [shared.randrange(3, 259) for _ in range(_BEGINNING_TOKENS)]
        prompt = [*beginning, *prompt[: _LONGEST_PROMPT - _BEGINNING_TOKENS]]
    length = rng.randint(1, _LONGEST_ANSWER)
    request = router.RouteRequest(
        request_id=str(number),
        tenant="soak",
        model=_MODEL,
        prompt_token_ids=prompt,
        stopping=sequence.Stopping(max_new_tokens=length),
        speculation=rng.choice(_SPECULATION),
        **rng.choice(_SAMPLINGS),
    )
    # 0: before the first token.
    return request, rng.randrange(length) if rng.random() < _CANCELLED else None


async def _ask(stay: Stay, request: router.RouteRequest, cancel_after: int | None, soaked: Soaked) -> None:
    received, finished = 0, False
    call = RouteCall(stay.stub, request, _TIMEOUT_S)
    try:
        if cancel_after != 0:
            async for response in call:
                received += len(response.token_ids)
                finished = finished or bool(response.finish_reason)
                if cancel_after is not None and received >= cancel_after:
                    break
    except OutriderError as error:
        soaked.errors[f"{error.code.name}: {error}"] += 1
        return
    finally:
        soaked.tokens += received
        call.cancel()
    whole = finished and received == request.stopping.max_new_tokens
    soaked.outcomes["complete" if whole else "cancelled" if cancel_after is not None else "short"] += 1


async def _settled(stay: Stay) -> None:
    """Returns once nothing is open and nothing held, or when that has taken too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SETTLE_S):
            while stay.num_open or any(stay.held.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def staying(num_blocks: int) -> AsyncIterator[Stay]:
    """The fleet. Raises CommandError when no metadata server is installed."""
    import torch
    from outrider.engine import EngineConfig
    from outrider.metadata import MetadataStore
    from outrider.rpc.channel import create_channel
    from outrider.rpc.v1 import router_pb2_grpc
    from outrider.testing.tiny import tiny_checkpoint
    from outrider_controller.router.config import RouterConfig
    from outrider_controller.router.process import running_router

    from benchmarks.support.redis_server import EmbeddedServer

    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-soak-")))
        try:
            server = stack.enter_context(EmbeddedServer.start(directory / "redis"))
        except (FileNotFoundError, RuntimeError) as error:
            raise CommandError(str(error)) from error
        model = tiny_checkpoint(directory / _MODEL, max_context_len=_CONTEXT)
        store = await stack.enter_async_context(MetadataStore.connect(server.url))
        # The draft's is smaller still: one that has no room must go without.
        blocks = {"target": num_blocks, "draft": num_blocks * 3 // 4}
        # Not the fused execution: it has oneDNN make a kernel for every number of rows, and keep the last 1024. That is
        # half a gigabyte, which is reached slowly and would hide a leak.
        configs = {role: EngineConfig(num_blocks=count, execution="native") for role, count in blocks.items()}
        engine, target = await start_target(stack, model, server.url, configs["target"])
        draft = await start_draft(stack, model, server.url, configs["draft"])
        async with asyncio.timeout(_SETTLE_S):
            while len(await store.workers()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running = await stack.enter_async_context(running_router(RouterConfig(), store))
        channel = await stack.enter_async_context(create_channel(running.address))
        yield Stay(router_pb2_grpc.RouterServiceStub(channel), running, target, draft, engine, blocks)


async def start_target(
    stack: AsyncExitStack, model: Path, url: str, engine_config: EngineConfig
) -> tuple[Engine, TargetServicer]:
    from outrider.target.config import TargetConfig
    from outrider.target.process import load, serve

    config = TargetConfig(str(model), "127.0.0.1:0", engine_config, _MODEL, metadata_url=url)
    engine, info = load(config)
    running = await stack.enter_async_context(serve(config, engine, info))
    return engine, running.servicer


async def start_draft(stack: AsyncExitStack, model: Path, url: str, engine_config: EngineConfig) -> DraftServicer:
    from outrider.draft.config import DraftConfig
    from outrider.draft.process import describe, serve
    from outrider.drafters import load_drafter

    config = DraftConfig(str(model), "127.0.0.1:0", engine=engine_config, metadata_url=url)
    drafter = load_drafter(model, engine=engine_config, model=config.drafting)
    running = await stack.enter_async_context(serve(config, drafter, describe(config, model, drafter)))
    return running.servicer


def memory_growth(rss: Sequence[tuple[int, int]], warm_up: int) -> Line:
    """Bytes over requests, after the first `warm_up` requests."""
    after = [(ended, held) for ended, held in rss if ended >= warm_up]
    return least_squares([ended for ended, _ in after], [held for _, held in after])


def problems(soaked: Soaked, growth: Line, measured: int) -> list[str]:
    """What must not be. `measured` requests came after the warm-up."""
    found = [f"{count} × {error}" for error, count in soaked.errors.items()]
    if soaked.outcomes["short"]:
        found.append(f"{soaked.outcomes['short']} answers ended before their time")
    for what in ("preemptions", "evictions"):
        if not getattr(soaked, what):
            found.append(f"no {what}: the KV pool was too large to show anything")
    if not soaked.outcomes["cancelled"]:
        found.append("nothing was cancelled")
    found += [f"{name}: {count} KV blocks were not given back" for name, count in soaked.held.items() if count]
    if soaked.still_open:
        found.append(f"{soaked.still_open} sequences are still open")
    gained, allowed = growth.slope * measured, _GROWTH * growth.intercept
    if gained > allowed:
        found.append(
            f"memory grew by {gained / 1e6:.1f} MB over {measured} requests, {allowed / 1e6:.1f} MB are allowed"
        )
    return found


def _table(soaked: Soaked, growth: Line) -> str:
    first, last = (rss / 1e6 for _, rss in (soaked.rss[0], soaked.rss[-1]))
    header = ["COMPLETE", "CANCELLED", "ERRORS", "TOKENS", "S", "PREEMPTIONS", "EVICTED BLOCKS", "BLOCKS HELD"]
    row = [
        soaked.outcomes["complete"],
        soaked.outcomes["cancelled"],
        soaked.errors.total(),
        soaked.tokens,
        f"{soaked.seconds:.0f}",
        soaked.preemptions,
        soaked.evictions,
        sum(soaked.held.values()),
    ]
    memory = [f"{first:.1f}", f"{growth.intercept / 1e6:.1f}", f"{last:.1f}", f"{growth.slope:.0f}"]
    return "\n\n".join(
        (
            columns(header, [row]),
            columns(["MB AT FIRST", "AFTER WARM-UP (FITTED)", "AT THE END", "BYTES/REQUEST"], [memory]),
        )
    )
