"""python -m benchmarks grammars"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import click
import psutil
from outrider.rpc.v1 import generation_pb2
from outrider.target.config import GRAMMAR_BYTES
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.arms import turns
from benchmarks.support.asking import Keyed, make_request
from benchmarks.support.hostile_grammars import NUM_GRAMMARS, as_message, hostile
from benchmarks.support.open_loop import p99_ratio, percentile_ms
from benchmarks.support.stacks import outside_cores
from benchmarks.support.tenants import make_tenants

_ARMS = ("alone", "plain", "hostile")
_QUIET, _OTHER = "quiet", "other"
_PROMPT = "Describe a town by the sea."
_QUIET_TOKENS, _OTHER_TOKENS = 256, 64
_WARM_UP = 8
_SAMPLE_S = 0.1
_ALONE_S = 20.0
_MAX_RATIO = 1.5
_MIB = 2**20
_Structured = generation_pb2.StructuredOutput | None


@dataclass(slots=True)
class Found:
    """The results of all arms."""

    gaps_s: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in _ARMS})
    """Arm → the time between two tokens of the quiet tenant."""
    ends: dict[str, Counter[str]] = field(default_factory=lambda: {arm: Counter() for arm in _ARMS})
    """Arm → how the other tenant's requests ended."""
    most_bytes: dict[str, int] = field(default_factory=dict)
    """Process → the most of its memory, beside hostile grammars. Of its children, all together."""


@click.command("grammars")
@click.option("--blocks", type=click.IntRange(1, NUM_GRAMMARS), default=8, show_default=True, help="Turns of each way.")
@click.option("--streams", type=click.IntRange(1, 64), default=2, show_default=True, help="Of the quiet tenant.")
@click.option("--others", type=click.IntRange(1, 64), default=8, show_default=True, help="Streams of the other one.")
@click.option("-n", "--num-grammars", type=click.IntRange(1, NUM_GRAMMARS), default=NUM_GRAMMARS, show_default=True)
@json_file_option
def grammars(blocks: int, streams: int, others: int, num_grammars: int, json_file: Path | None) -> int:
    """What does a tenant with plain streams notice of another that sends hostile grammars?

    The other tenant sends regular expressions, JSON schemas and grammars with very many states, or such as nobody
    compiles, a few at a time; in turns with that, as many plain requests, and nothing. Measured are the time between
    two tokens of the quiet tenant, and the memory of gateway, target and the processes in which they try grammars. All
    without speculation.
    """
    return run_async(_grammars(blocks, streams, others, num_grammars, json_file))


async def _grammars(blocks: int, streams: int, others: int, num_grammars: int, json_file: Path | None) -> int:
    found = Found()
    messages = itertools.starmap(as_message, itertools.islice(hostile(), 0, None, NUM_GRAMMARS // num_grammars))
    asked: dict[str, Iterator[_Structured]] = {"plain": itertools.repeat(None), "hostile": messages}
    each = -(-num_grammars // blocks)
    async with (
        Stack(StackConfig(pin=True, drafts=0), note) as stack,
        _clients(stack) as (quiet, other),
    ):
        processes = {name: psutil.Process(stack.processes[name].pid) for name in ("target-0", "gateway")}
        with outside_cores(stack):
            await _warm_up(stack, quiet, other)
            before_bytes, before = _memory(processes), psutil.cpu_times()
            for _, arm in turns(blocks, list(_ARMS)):
                async with _measured(stack, quiet, streams, found.gaps_s[arm]), _watched(processes, arm, found):
                    if arm == "alone":
                        await asyncio.sleep(_ALONE_S)
                    else:
                        await _send(stack, other, itertools.islice(asked[arm], each), others, found.ends[arm])
                note(f"{arm}: p99 gap {percentile_ms(found.gaps_s[arm], 0.99)} ms so far")
    stolen_s = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(before, "steal", 0.0)
    return _report(found, before_bytes, stolen_s, json_file)


async def _warm_up(stack: Stack, quiet: Gateway, other: Gateway) -> None:
    """What a target holds for its first answers, and for its first grammar, is not of hostile ones."""
    simple = generation_pb2.StructuredOutput(regex="[a-z]+")
    await _send(stack, quiet, [None] * _WARM_UP, _WARM_UP, Counter())
    await _send(stack, other, [simple] * _WARM_UP, _WARM_UP, Counter())


async def _send(stack: Stack, gateway: Gateway, asked: Iterable[_Structured], streams: int, ends: Counter[str]) -> None:
    """Sends the requests, so many at a time."""
    waiting = iter(asked)

    async def stream() -> None:
        for structured in waiting:
            ends[await _end(gateway, _request(stack, structured, _OTHER_TOKENS))] += 1

    await asyncio.gather(*(stream() for _ in range(streams)))


async def _end(gateway: Gateway, request: generation_pb2.GenerateRequest) -> str:
    try:
        return (await gateway.answer(request)).finish_reason
    except CommandError as error:
        return error.reason


@asynccontextmanager
async def _measured(stack: Stack, gateway: Gateway, streams: int, gaps_s: list[float]) -> AsyncIterator[None]:
    """Keeps streams of the quiet tenant under way."""

    async def stream() -> None:
        while True:
            at_s = 0.0
            async for chunk in gateway.stream(_request(stack, None, _QUIET_TOKENS)):
                if chunk.token_ids:
                    now_s = monotonic()
                    gaps_s.extend([now_s - at_s] if at_s else [])
                    at_s = now_s

    async with _during(stream() for _ in range(streams)):
        yield


@asynccontextmanager
async def _watched(processes: dict[str, psutil.Process], arm: str, found: Found) -> AsyncIterator[None]:
    """Samples the memory beside hostile grammars."""

    async def sample() -> None:
        while arm == "hostile":
            for name, num_bytes in _memory(processes).items():
                found.most_bytes[name] = max(found.most_bytes.get(name, 0), num_bytes)
            await asyncio.sleep(_SAMPLE_S)

    async with _during([sample()]):
        yield


def _memory(processes: dict[str, psutil.Process]) -> dict[str, int]:
    found = dict[str, int]()
    for name, process in processes.items():
        found[name] = process.memory_info().rss
        found[f"{name}'s children"] = sum(_resident(child, process) for child in process.children(recursive=True))
    return found


def _resident(child: psutil.Process, parent: psutil.Process) -> int:
    try:
        # Before it executes its program it has the parent's memory, and counts it as its own.
        return int(child.memory_info().rss) if child.cmdline() != parent.cmdline() else 0
    except psutil.NoSuchProcess:
        return 0


@asynccontextmanager
async def _during(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs the work during the block. Raises its first error."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        yield
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _clients(stack: Stack) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Of both tenants."""
    keys = await make_tenants(stack, (_QUIET, _OTHER))
    async with Keyed(stack.gateway_grpc, keys[_QUIET]) as quiet, Keyed(stack.gateway_grpc, keys[_OTHER]) as other:
        yield quiet, other


def _request(stack: Stack, structured: _Structured, max_tokens: int) -> generation_pb2.GenerateRequest:
    request = make_request(stack.config.model, _PROMPT, "off", max_tokens=max_tokens, ignore_eos=structured is None)
    if structured is not None:
        request.options.structured.CopyFrom(structured)
    return request


def _report(found: Found, before_bytes: dict[str, int], stolen_s: float, json_file: Path | None) -> int:
    rows = [
        {
            "beside": arm,
            "gaps": len(gaps_s),
            "gap p50 ms": percentile_ms(gaps_s, 0.5),
            "p99": percentile_ms(gaps_s, 0.99),
            "the other's ends": dict(found.ends[arm]),
        }
        for arm, gaps_s in found.gaps_s.items()
    ]
    grown = {name: round((most - before_bytes[name]) / _MIB, 1) for name, most in found.most_bytes.items()}
    grown_mib = max(grown["target-0"], grown["gateway"])
    bound_mib, (alone, plain, hostile_s) = GRAMMAR_BYTES / _MIB, (found.gaps_s[arm] for arm in _ARMS)
    low, p99, high = p99_ratio(plain, hostile_s)
    p50 = median(hostile_s) / median(plain)
    report.show(
        report.table(rows),
        f"gap beside hostile grammars / beside as many plain requests: p50 {p50:.2f}, p99 {p99:.2f} "
        f"(90 %: {low:.2f} to {high:.2f}); at most {_MAX_RATIO}",
        f"gap beside hostile grammars / alone: p99 {p99_ratio(alone, hostile_s)[1]:.2f}",
        f"memory grew by, in MiB: {grown}; bound of target and of gateway {bound_mib:.0f} MiB",
        f"CPU time that the host took: {stolen_s:.1f} s",
    )
    holds = max(p50, p99) <= _MAX_RATIO and grown_mib <= bound_mib
    ratios = {"p50_ratio": p50, "p99_ratio": p99, "p99_interval": [low, high]}
    memory = {"grown_mib": grown, "bound_mib": bound_mib}
    return report.finish(
        "grammars", {"holds": holds, **ratios, **memory, "stolen_s": stolen_s, "arms": rows}, json_file
    )
