"""python -m benchmarks neighbour"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from outrider.rpc.v1 import tenants_pb2
from outrider.runtime.spawn import bound_to_us
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.arms import turns
from benchmarks.support.open_loop import client, p99_ratio, percentile_ms
from benchmarks.support.paced_stack import paced_stack
from benchmarks.support.virtual_stack import first_tokens_s

_TARGETS, _PLACES = 2, 8
_QUEUE_TIMEOUT_S = 4.0
_QUOTA = 4.0
_QUIET_RATE = 8.0
_SETTLE_S = 2.0
_MAX_RATIO = 1.2
_ARMS = ("alone", "beside")


@dataclass(slots=True)
class Noise:
    """The results of the noisy tenant's requests."""

    codes: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)


@click.command("neighbour")
@click.option("--times", type=click.FloatRange(1, 200), default=50.0, show_default=True, help="Its quota.")
@click.option("--blocks", type=click.IntRange(1, 100), default=6, show_default=True, help="Turns of each way.")
@click.option("--seconds", type=click.FloatRange(1), default=15.0, show_default=True, help="Of each turn.")
@click.option("--virtual", type=click.FloatRange(10), metavar="SECONDS", help="Instead: so long, in virtual time.")
@json_file_option
def neighbour(times: float, blocks: int, seconds: float, virtual: float | None, json_file: Path | None) -> int:
    """What does a tenant notice of another that asks for many times its quota?

    A quiet tenant asks 8 times a second, at random times; a noisy one, with a quota of 4 requests a second, asks for 50
    times that without regard to refusals, from a process of its own. Alone and beside it take turns. The stack is that
    of `overload`. In virtual time there are router and targets only: what admission and batching do, without the CPU
    that all share here; the noisy one asks as often as its quota allows.
    """
    if virtual is not None:
        return _virtual(virtual, json_file)
    return run_async(_neighbour(times, blocks, seconds, json_file))


async def _neighbour(times: float, blocks: int, seconds: float, json_file: Path | None) -> int:
    first_tokens: dict[str, list[float]] = {arm: [] for arm in _ARMS}
    noisy = Noise()
    codes = {"quiet": Counter[str](), "noisy": noisy.codes}
    before = psutil.cpu_times()
    async with paced_stack(_TARGETS, _PLACES, _QUEUE_TIMEOUT_S) as stack:
        quota = tenants_pb2.Quota(requests_per_second=_QUOTA)
        keys = {"quiet": await stack.tenant("quiet"), "noisy": await stack.tenant("noisy", quota)}
        async with client(stack.address, keys["quiet"]) as quiet:
            await quiet.open_loop(_QUIET_RATE, _SETTLE_S)
            for _, arm in turns(blocks, list(_ARMS)):
                async with AsyncExitStack() as turn:
                    if arm == "beside":
                        await turn.enter_async_context(
                            _noise(stack.address, keys["noisy"], times * _QUOTA, seconds, noisy)
                        )
                    ended = await quiet.open_loop(_QUIET_RATE, seconds)
                first_tokens[arm] += [one.first_token_s for one in ended if one.first_token_s is not None]
                codes["quiet"].update(one.code for one in ended)
                note(f"{arm}: p99 first token {percentile_ms(first_tokens[arm], 0.99)} ms so far")
    after = psutil.cpu_times()
    stolen_s = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    low, ratio, high = p99_ratio(first_tokens["alone"], first_tokens["beside"])
    rows = [_cells(arm, found) for arm, found in first_tokens.items()]
    holds = ratio <= _MAX_RATIO and set(codes["quiet"]) == {"OK"}
    p99 = percentile_ms(noisy.refused_s, 0.99)
    report.show(
        report.table(rows),
        f"p99 beside / alone: {ratio:.2f} (90 %: {low:.2f} to {high:.2f}); refusals of the noisy one: p99 {p99} ms; "
        f"ends: quiet {dict(codes['quiet'])}, noisy {dict(codes['noisy'])}; "
        f"CPU time that the host took: {stolen_s:.1f} s",
    )
    body = {"holds": holds, "ratio": ratio, "interval": [low, high], "refused_p99_ms": p99, "stolen_s": stolen_s}
    return report.finish("neighbour", {**body, "first_token": rows, "ends": codes}, json_file)


def _virtual(seconds: float, json_file: Path | None) -> int:
    rates = {"alone": {"quiet": _QUIET_RATE}, "beside": {"quiet": _QUIET_RATE, "noisy": _QUOTA}}
    found = {arm: first_tokens_s(rates[arm], seconds, targets=_TARGETS, places=_PLACES)["quiet"] for arm in _ARMS}
    low, ratio, high = p99_ratio(found["alone"], found["beside"])
    rows = [_cells(arm, times_s) for arm, times_s in found.items()]
    report.show(report.table(rows), f"p99 beside / alone: {ratio:.2f} (90 %: {low:.2f} to {high:.2f})")
    body = {"holds": ratio <= _MAX_RATIO, "ratio": ratio, "interval": [low, high], "first_token": rows}
    return report.finish("neighbour-virtual", body, json_file)


def _cells(arm: str, found: Sequence[float]) -> report.Row:
    return {
        "quiet": arm,
        "answers": len(found),
        "first token p50 ms": percentile_ms(found, 0.5),
        "p99": percentile_ms(found, 0.99),
    }


@asynccontextmanager
async def _noise(address: str, key: str, rate: float, seconds: float, found: Noise) -> AsyncIterator[None]:
    """Runs the noisy tenant in its own process, from some time before the block until after its end."""
    argv = (sys.executable, "-m", "benchmarks.support.open_loop", address, key, str(rate), str(seconds + 2 * _SETTLE_S))
    child = await asyncio.create_subprocess_exec(*bound_to_us(argv), stdin=PIPE, stdout=PIPE)
    try:
        assert child.stdin is not None and child.stdout is not None
        await child.stdout.readline()
        child.stdin.write(b"\n")
        await asyncio.sleep(_SETTLE_S)
        yield
        counts = json.loads(await child.stdout.read())
        found.codes.update(counts["codes"])
        found.refused_s += counts["refused_s"]
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
