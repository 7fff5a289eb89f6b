"""python -m benchmarks unfinished"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import click
from outrider.rpc.v1 import tenants_pb2
from outrider.runtime.spawn import bound_to_us
from outrider.runtime.supervision import background
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.arms import turns
from benchmarks.support.open_loop import client, p99_ratio, percentile_ms
from benchmarks.support.paced_stack import PacedStack, paced_stack

_TARGETS, _PLACES = 2, 8
_QUEUE_TIMEOUT_S = 4.0
_RATE = 8.0
_SETTLE_S = 2.0
_MAX_RATIO = 1.5
_MAX_GREEDY_RATIO = 3.0
_QUOTA = tenants_pb2.Quota(tokens_per_minute=400)
_MAX_MORE_MIB = 512
_AGAIN = 20.0
"""Connections that the gateway has closed and that begin again, a second."""
_BODY_BYTES = 4 << 20
_ARMS = ("alone", "beside")


@click.command("unfinished")
@click.option("--connections", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--with-key", is_flag=True, help="They have a key, of another tenant.")
@click.option("--greedy", is_flag=True, help="Their requests are whole, one after another, far over a quota.")
@click.option("--blocks", type=click.IntRange(1, 100), default=3, show_default=True, help="Turns of each way.")
@click.option("--seconds", type=click.FloatRange(1), default=15.0, show_default=True, help="Of each turn.")
@json_file_option
def unfinished(
    connections: int, with_key: bool, greedy: bool, blocks: int, seconds: float, json_file: Path | None
) -> int:
    """What do a tenant and the gateway's memory notice of requests that do not end?

    A tenant asks 8 times a second. Beside it there are many connections, half HTTP and half gRPC, with requests of
    4 MiB that lack their last byte, from a process with the least priority. Alone and beside them take turns.

    With --greedy their requests ask for sixteen answers each, and belong to a tenant with a quota of one a minute.
    """
    return run_async(_unfinished(connections, with_key, greedy, blocks, seconds, json_file))


async def _unfinished(
    count: int, with_key: bool, greedy: bool, blocks: int, seconds: float, json_file: Path | None
) -> int:
    first_tokens: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    memory_mib = dict.fromkeys(_ARMS, 0.0)
    codes = Counter[str]()
    async with paced_stack(_TARGETS, _PLACES, _QUEUE_TIMEOUT_S) as stack:
        key, hostile = await stack.tenant("quiet"), "-"
        if with_key or greedy:
            hostile = await stack.tenant("hostile", _QUOTA if greedy else None)
        size, max_ratio = (0, _MAX_GREEDY_RATIO) if greedy else (_BODY_BYTES, _MAX_RATIO)
        async with client(stack.address, key) as quiet:
            await quiet.open_loop(_RATE, _SETTLE_S)
            for _, arm in turns(blocks, list(_ARMS)):
                async with AsyncExitStack() as turn:
                    watch = background(_watch_memory(stack, arm, memory_mib), "memory")
                    await turn.enter_async_context(watch)
                    if arm == "beside":
                        await turn.enter_async_context(_hostile(stack, hostile, count, size))
                    ended = await quiet.open_loop(_RATE, seconds)
                first_tokens[arm] += [one.first_token_s for one in ended if one.first_token_s is not None]
                codes.update(one.code for one in ended)
                note(f"{arm}: p99 {percentile_ms(first_tokens[arm], 0.99)} ms so far; {memory_mib[arm]:.0f} MiB")
    low, ratio, high = p99_ratio(first_tokens["alone"], first_tokens["beside"])
    rows: list[report.Row] = [
        {
            "tenant": arm,
            "answers": len(found),
            "first token p50 ms": percentile_ms(found, 0.5),
            "p99": percentile_ms(found, 0.99),
            "gateway MiB": round(memory_mib[arm]),
        }
        for arm, found in first_tokens.items()
    ]
    more_mib = memory_mib["beside"] - memory_mib["alone"]
    holds = ratio <= max_ratio and more_mib <= _MAX_MORE_MIB and set(codes) == {"OK"}
    report.show(
        report.table(rows),
        f"p99 beside / alone: {ratio:.2f} (90 %: {low:.2f} to {high:.2f}); {more_mib:.0f} MiB more, of "
        f"{_MAX_MORE_MIB} allowed; ends: {dict(codes)}",
    )
    body = {"holds": holds, "ratio": ratio, "interval": [low, high], "more_mib": more_mib, "with_key": with_key}
    body |= {"greedy": greedy}
    return report.finish("unfinished", {**body, "first_token": rows, "ends": codes}, json_file)


async def _watch_memory(stack: PacedStack, arm: str, most_mib: dict[str, float]) -> None:
    while True:
        most_mib[arm] = max(most_mib[arm], stack.memory_mib()["gateway"])
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _hostile(stack: PacedStack, key: str, count: int, size: int) -> AsyncIterator[None]:
    argv = (sys.executable, "-m", "benchmarks.support.unfinished", stack.http, stack.address, key)
    numbers = (str(count), str(size), str(_AGAIN))
    child = await asyncio.create_subprocess_exec(*bound_to_us((*argv, *numbers)), stdout=PIPE)
    try:
        assert child.stdout is not None
        await child.stdout.readline()
        await asyncio.sleep(_SETTLE_S)
        yield
    finally:
        child.kill()
        await child.wait()
