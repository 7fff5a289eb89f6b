"""python -m tests.soak streams"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
from outrider.hardware import hardware
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import Gateway, GatewayAnswer
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async, stack_options
from outrider_controller.control.api.rows import worker_rows

from benchmarks.support.asking import make_request
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread

_SETTLE_TIMEOUT_S = 15.0
_MARGIN = 12

Holdings = dict[str, dict[str, int]]
"""Process → descriptors and threads."""


@click.command("streams")
@prompts_option
@click.option("--concurrency", type=click.IntRange(1, 1024), default=32, show_default=True, help="Streams at once.")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Each after the other.")
@stack_options(pin=True)
@json_file_option
def streams(config: StackConfig, prompts_file: Path, concurrency: int, rounds: int, json_file: Path | None) -> int:
    """Many streams at once: do all end, and is everything given back?

    Streams of 8 to 160 tokens, every fourth cancelled by the client half way. After each round every KV block must be
    free again, and no process may hold more file descriptors or threads than after the first.
    """
    prompts = spread(read_prompts(prompts_file), concurrency)
    return run_async(_streams(config, prompts, concurrency, rounds, json_file))


async def _streams(
    config: StackConfig, prompts: list[Prompt], concurrency: int, rounds: int, json_file: Path | None
) -> int:
    measured: list[dict[str, Any]] = []
    async with Stack(config, note) as stack, Gateway(stack.gateway_grpc) as gateway:
        for number in range(rounds):
            report = Progress(f"round {number + 1}", concurrency)
            started_s = time.monotonic()
            ended = await one_round(gateway, config.model, prompts, concurrency, random.Random(number), report)
            seconds = time.monotonic() - started_s
            held = await settled(stack)
            measured.append({**ended, "seconds": round(seconds, 2), "blocks_held": held, "holds": await held_by(stack)})
    found = problems(measured)
    click.echo(_table(measured))
    for problem in found:
        click.echo(problem)
    report_body = {"holds": not found, "problems": found, "concurrency": concurrency, "rounds": measured}
    write_json(json_file, "bench-streams", {**report_body, "hardware": hardware()})
    return ExitCode.ERROR if found else ExitCode.OK


async def one_round(
    gateway: Gateway,
    model: str,
    prompts: list[Prompt],
    concurrency: int,
    rng: random.Random,
    report: Callable[[int, str], None] = lambda done, note: None,
) -> dict[str, Any]:
    """As many streams as `concurrency` says, started at once; how they ended."""
    done = 0

    async def ask(number: int) -> GatewayAnswer | str | None:
        """The answer, an error, or None when cancelled."""
        nonlocal done
        prompt = prompts[number % len(prompts)]
        length = rng.randint(8, 160)
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.95}
        request = make_request(model, prompt.text, "auto", max_tokens=length, ignore_eos=True, **sampling)
        try:
            if number % 4 == 3:
                await _left_half_way(gateway, request, length // 2)
                return None
            answer = await gateway.answer(request)
            whole = len(answer.token_ids) == length and answer.finish_reason == "length"
            return answer if whole else f"{len(answer.token_ids)} of {length} tokens, {answer.finish_reason!r}"
        except CommandError as error:
            return str(error)
        finally:
            done += 1
            report(done, "")

    outcomes = await asyncio.gather(*(ask(number) for number in range(concurrency)))
    answered = [outcome for outcome in outcomes if isinstance(outcome, GatewayAnswer)]
    figures = AnswerFigures.of(answered)
    return {
        "complete": len(answered),
        "cancelled": sum(outcome is None for outcome in outcomes),
        "errors": [outcome for outcome in outcomes if isinstance(outcome, str)],
        "tokens": figures.tokens,
        "acceptance": round(figures.acceptance, 4),
    }


async def _left_half_way(gateway: Gateway, request: Any, tokens: int) -> None:
    received = 0
    async with contextlib.aclosing(gateway.stream(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            received += len(chunk.token_ids)
            if received >= tokens:
                return


async def settled(stack: Stack) -> int:
    """Blocks still held when nothing is running any more. Loads come with the workers' heartbeats."""
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        # Two heartbeats: one may have been sent just before the end.
        await asyncio.sleep(2.2)
        rows = [row for row in worker_rows(await stack.workers()) if row["role"] in ("draft", "target")]
        held: int = sum(row["num_blocks"] - row["free_blocks"] for row in rows if row["num_blocks"])
        idle = not any(row["running"] or row["waiting"] for row in rows)
        if (idle and not held) or time.monotonic() > deadline_s:
            return held


async def processes_of(stack: Stack) -> dict[str, int]:
    """Process ids of every worker, router, control plane and gateway. Ray's own daemons are Ray's matter."""
    pids = {row["id"]: row["pid"] for row in worker_rows(await stack.workers()) if row["role"] in ("router", "control")}
    return pids | {name: one.pid for name, one in stack.processes.items() if name not in ("controller", "redis")}


async def held_by(stack: Stack) -> Holdings:
    held: Holdings = {}
    for name, pid in (await processes_of(stack)).items():
        process = psutil.Process(pid)
        held[name] = {"descriptors": process.num_fds(), "threads": process.num_threads()}
    return held


def problems(measured: list[dict[str, Any]]) -> list[str]:
    found = []
    for number, one in enumerate(measured, 1):
        found += [f"round {number}: {error}" for error in one["errors"]]
        if one["blocks_held"]:
            found.append(f"round {number}: {one['blocks_held']} KV blocks were not given back")
    first, last = measured[0]["holds"], measured[-1]["holds"]
    for name in first.keys() & last.keys():
        for what, count in last[name].items():
            # gRPC opens a few now and then for itself; a leak is one for each stream.
            if count > first[name][what] + _MARGIN:
                found.append(f"{name}: {what} grew from {first[name][what]} to {count}")
    return found


def _table(measured: list[dict[str, Any]]) -> str:
    names = list(measured[0]["holds"])
    header = ["ROUND", "COMPLETE", "CANCELLED", "ERRORS", "TOKENS", "S", "BLOCKS HELD", *(f"FD {n}" for n in names)]
    rows = [
        [
            number,
            one["complete"],
            one["cancelled"],
            len(one["errors"]),
            one["tokens"],
            f"{one['seconds']:.1f}",
            one["blocks_held"],
            *(one["holds"][name]["descriptors"] for name in names),
        ]
        for number, one in enumerate(measured, 1)
    ]
    return columns(header, rows)
