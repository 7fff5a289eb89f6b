"""python -m benchmarks drafts"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.hardware import hardware
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.stack import Stack
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async

from benchmarks.arms import PAIR_HEADER, ask_both_ways, compared, pair_cells
from benchmarks.support.asking import count_option, max_tokens_option
from benchmarks.support.prompts import prompts_option, read_prompts, spread
from benchmarks.support.stacks import beside, replace_drafts

_BOUND = 0.95
_LIFE_S = 5.0
_FAULTS = ("wrong", "stalls", "dies")
_MEANING = {
    "wrong": "every token wrong",
    "stalls": "stalls 200 ms at random",
    "dies": "killed 5 s after it came",
}


@click.command("drafts")
@prompts_option
@count_option(20)
@max_tokens_option(64)
@click.option("--fault", "faults", type=click.Choice(_FAULTS), multiple=True, default=_FAULTS, help="Default: each.")
@json_file_option
def drafts(
    prompts_file: Path, num_prompts: int, max_tokens: int, faults: tuple[str, ...], json_file: Path | None
) -> int:
    """What does a bad draft cost?

    The shipped draft, made bad: always wrong; stalling at random; killed every 5 s and started again. Greedy, one
    stream, speculation auto: each prompt is answered with and without, one right after the other. Speculation must not
    fall under 0.95 of plain, and the texts must be equal.
    """
    prompts = [prompt.text for prompt in spread(read_prompts(prompts_file), num_prompts)]
    return run_async(_drafts(prompts, max_tokens, faults, json_file))


async def _drafts(prompts: list[str], max_tokens: int, faults: tuple[str, ...], json_file: Path | None) -> int:
    rows: list[dict[str, Any]] = []
    config = StackConfig(pin=True, realtime=True, prefix_cache=False)
    async with Stack(config, note) as stack, Gateway(stack.gateway_grpc) as gateway:
        for fault in faults:
            await replace_drafts(stack, config.draft_kind, config.draft, "" if fault == "dies" else fault)
            async with _dying(stack, fault == "dies") as deaths:
                with beside(stack):
                    pairs = await ask_both_ways(gateway, config.model, prompts, max_tokens, fault)
            rows.append({"fault": fault, "deaths": len(deaths), **compared(pairs, _BOUND)})
    click.echo(columns(["DRAFT", "DEATHS", *PAIR_HEADER], [_cells(row) for row in rows]))
    holds = all(row["holds"] for row in rows)
    body = {"holds": holds, "bound": _BOUND, "max_tokens": max_tokens, "drafts": rows, "hardware": hardware()}
    write_json(json_file, "bench-drafts", body)
    return ExitCode.OK if holds else ExitCode.ERROR


def _cells(row: dict[str, Any]) -> list[object]:
    return [_MEANING[row["fault"]], row["deaths"], *pair_cells(row)]


@asynccontextmanager
async def _dying(stack: Stack, wanted: bool) -> AsyncIterator[list[int]]:
    """While the block runs, the draft is killed `_LIFE_S` after it came, and started again. Yields the pids so far."""
    deaths: list[int] = []
    if not wanted:
        yield deaths
        return
    killing = asyncio.create_task(_kill_again_and_again(stack, deaths))
    try:
        yield deaths
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


async def _kill_again_and_again(stack: Stack, deaths: list[int]) -> None:
    while True:
        await asyncio.sleep(_LIFE_S)
        process = stack.processes["draft-0"]
        deaths.append(process.pid)
        process.stopping = True
        process.kill()
        await stack.restart("draft-0")
