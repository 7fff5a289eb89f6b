"""python -m benchmarks router"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from outrider.runtime.spawn import bound_to_us
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from tests.redis_server import EmbeddedServer

_START_TIMEOUT_S = 120.0
_STOP_GRACE_S = 10.0
_MAX_CORES = 1.0
_MAX_P99_MS = 5.0
_WAYS = ("target to router", "router to gateway", "router to target")


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one load."""

    measured: dict[str, Any]

    @property
    def sequences(self) -> int:
        return int(self.measured["sequences"])

    @property
    def steps_per_s(self) -> float:
        """Steps per second of each sequence."""
        return float(self.measured["commits"] / self.measured["window_s"] / self.sequences)

    @property
    def router_cores(self) -> float:
        return float(self.measured["router_cpu_s"] / self.measured["window_s"])

    @property
    def fleet_cores(self) -> float:
        return float(self.measured["fleet_cpu_s"] / self.measured["window_s"])

    @property
    def us_per_token(self) -> float:
        return float(1e6 * self.measured["router_cpu_s"] / self.measured["tokens"])

    def messages_per_step(self, way: str) -> float:
        """Messages per target step, for all its sequences together."""
        return float(self.measured["messages"].get(way, 0) / self.measured["steps"])

    def problems(self) -> list[str]:
        """The failed checks."""
        found = []
        if self.steps_per_s < 0.98 * self.measured["steps_per_s"]:
            found.append(f"{self.sequences} sequences: only {self.steps_per_s:.1f} steps/s each")
        if self.router_cores > _MAX_CORES:
            found.append(f"{self.sequences} sequences: the router took {self.router_cores:.2f} cores")
        if self.measured["to_client_ms"]["p99"] > _MAX_P99_MS:
            found.append(f"{self.sequences} sequences: to_client_ms p99 is {self.measured['to_client_ms']['p99']:.1f}")
        return found


def _numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("must be numbers, separated by commas") from None
    if not all(1 <= number <= 1024 for number in numbers):
        raise click.BadParameter("each must be in 1 to 1024: what one router carries")
    return numbers


@click.command("router")
@click.option(
    "--sequences", default="10,100,1000", show_default=True, callback=_numbers, metavar="N,N,…", help="At once."
)
@click.option("--seconds", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Of each measurement.")
@json_file_option
def router(sequences: tuple[int, ...], seconds: float, json_file: Path | None) -> int:
    """What does the router cost, and what does it add?

    A real router, on the first core, between simulated workers and two gateways on the last: targets of 64 sequences
    that step 30 times a second, drafts that guess seven tokens in ten. Answers end, and others begin. Latency is of
    commits from target to gateway, by one clock, with gRPC at both ends.
    """
    return run_async(_router(sequences, seconds, json_file))


async def _router(sequences: tuple[int, ...], seconds: float, json_file: Path | None) -> int:
    rows = [Row(one) for one in await measured([{"sequences": number, "seconds": seconds} for number in sequences])]
    problems = [problem for row in rows for problem in row.problems()] + growth(rows)
    messages = report.table([_messages(row) for row in rows])
    report.show(
        report.table([_cells(row) for row in rows]),
        f"Messages per step of a target:\n{messages}",
        "\n".join(problems),
    )
    body = {"holds": not problems, "problems": problems}
    return report.finish("router", {**body, "loads": [_json(row) for row in rows]}, json_file)


def growth(rows: list[Row]) -> list[str]:
    """Problems if the cost of a token grows with the number of sequences."""
    first, last = rows[0], rows[-1]
    if last.us_per_token <= first.us_per_token:
        return []
    costs = [f"{row.us_per_token:.1f} µs with {row.sequences}" for row in (first, last)]
    return [f"the cost of a token grows: {costs[0]}, {costs[1]}"]


async def measured(loads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One after the other, at one router. Raises CommandError, ProcessFailed."""
    cores = sorted(os.sched_getaffinity(0))
    router_core, fleet_core = cores[0], cores[-1]
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as directory:
        async with _router_process(Path(directory), fleet_core) as metadata_url:
            note(f"router on core {router_core}, fleet on core {fleet_core}")
            given = {"metadata_url": metadata_url, "router_core": router_core, "loads": loads}
            return await _fleet(given, fleet_core)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


@asynccontextmanager
async def _router_process(directory: Path, core: int) -> AsyncIterator[str]:
    """One router in an actor, as in `outrider up`. Ray's daemons stay on `core`. Yields the metadata URL."""
    try:
        redis = EmbeddedServer.start(directory)
    except (FileNotFoundError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    with redis:
        control = f"127.0.0.1:{Ports().claim()}"
        argv = (sys.executable, "-m", "outrider_controller", "--metadata", redis.url, "--control-listen", control)
        # Ready when the control port listens: the fleet waits for the router's lease.
        spec = ProcessSpec("controller", argv, control, cores=(core,), answers=partial(_listens, control))
        process = ManagedProcess(spec, directory / "controller.log")
        try:
            await process.start()
            await process.ready(_START_TIMEOUT_S)
            yield redis.url
        finally:
            await process.stop(_STOP_GRACE_S)


async def _fleet(given: dict[str, Any], core: int) -> list[dict[str, Any]]:
    child = await asyncio.create_subprocess_exec(
        *bound_to_us((sys.executable, "-m", "benchmarks.support.router_load"), (core,)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await child.communicate(json.dumps(given).encode())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise CommandError(f"the fleet failed: {error.decode(errors='replace')[-2000:]}")
    return list(json.loads(out))


def _json(row: Row) -> dict[str, Any]:
    names = ("steps_per_s", "router_cores", "fleet_cores", "us_per_token")
    per_step = {way: round(row.messages_per_step(way), 3) for way in _WAYS}
    return {**row.measured, **{name: round(getattr(row, name), 4) for name in names}, "messages_per_step": per_step}


def _cells(row: Row) -> report.Row:
    measured = row.measured
    return {
        "SEQUENCES": row.sequences,
        "TARGETS": measured["targets"],
        "DRAFTS": measured["drafts"],
        "STEPS/S EACH": f"{row.steps_per_s:.1f}",
        "TOKENS/S": f"{measured['tokens'] / measured['window_s']:.0f}",
        "ROUTER CORES": f"{row.router_cores:.2f}",
        "µS/TOKEN": f"{row.us_per_token:.1f}",
        **{f"TO CLIENT {p.upper()} MS": f"{measured['to_client_ms'][p]:.2f}" for p in ("p50", "p99")},
        "FLEET CORES": f"{row.fleet_cores:.2f}",
    }


def _messages(row: Row) -> report.Row:
    return {"SEQUENCES": row.sequences, **{way.upper(): f"{row.messages_per_step(way):.2f}" for way in _WAYS}}
