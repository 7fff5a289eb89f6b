"""python -m benchmarks delay"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.rpc.channel import create_channel
from outrider_controller.cli.client import Gateway, worker_rows
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.hardware import hardware
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.stack import Stack
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async

from benchmarks.arms import PAIR_HEADER, ask_both_ways, compared, pair_cells
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.prompts import prompts_option, read_prompts, spread
from benchmarks.support.stacks import added_round_trip, beside, delayed

_BOUND = 0.98
_PROBES = 20


def _delays(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        delays = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("must be numbers, separated by commas") from None
    if not all(0 <= delay <= 1000 for delay in delays):
        raise click.BadParameter("each must be in 0 to 1000")
    return delays


@click.command("delay")
@prompts_option
@count_option(20)
@max_tokens_option(64)
@click.option(
    "--added-ms", default="0,1,5,20", show_default=True, callback=_delays, metavar="MS,MS,…", help="Round trips."
)
@json_file_option
def delay(
    prompts_file: Path, num_prompts: int, max_tokens: int, added_ms: tuple[float, ...], json_file: Path | None
) -> int:
    """What is speculation worth when router and workers are far apart?

    A proxy between router and workers adds to the round trip. Greedy, one stream, speculation auto: each prompt is
    answered with and without, one right after the other, at every delay. Speculation must not fall under 0.98 of plain.
    """
    prompts = [prompt.text for prompt in spread(read_prompts(prompts_file), num_prompts)]
    return run_async(_delay(prompts, max_tokens, added_ms, json_file))


async def _delay(prompts: list[str], max_tokens: int, added_ms: tuple[float, ...], json_file: Path | None) -> int:
    rows: list[dict[str, Any]] = []
    config = StackConfig(pin=True, realtime=True, prefix_cache=False)
    async with Stack(config, note, delayed) as stack, Gateway(stack.gateway_grpc) as gateway:
        for added in added_ms:
            await added_round_trip(stack, added)
            measured_ms = await _round_trip_ms(stack)
            with beside(stack):
                pairs = await ask_both_ways(gateway, config.model, prompts, max_tokens, f"{added:g} ms")
            rows.append({"added_ms": added, "measured_ms": measured_ms, **compared(pairs, _BOUND)})
    header = ["ADDED MS", "ROUND TRIP MS", *PAIR_HEADER]
    click.echo(columns(header, [[f"{r['added_ms']:g}", f"{r['measured_ms']:.1f}", *pair_cells(r)] for r in rows]))
    holds = all(row["holds"] for row in rows)
    body = {"holds": holds, "bound": _BOUND, "max_tokens": max_tokens, "delays": rows, "hardware": hardware()}
    write_json(json_file, "bench-delay", body)
    return ExitCode.OK if holds else ExitCode.ERROR


async def _round_trip_ms(stack: Stack) -> float:
    """To the target as the router reaches it: the shortest of a few health checks."""
    address = next(row["address"] for row in worker_rows(await stack.workers()) if row["role"] == "target")
    took_s = []
    async with create_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(_PROBES):
            started_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            took_s.append(time.monotonic() - started_s)
    return round(min(took_s) * 1e3, 2)
