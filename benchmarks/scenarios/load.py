"""python -m benchmarks load"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.stack import Stack
from outrider_controller.cli.stack_config import StackConfig
from outrider_controller.cli.stack_options import run_async

from benchmarks.arms import turns
from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import answers, max_tokens_option
from benchmarks.support.prompts import Prompt, read_prompts, spread
from benchmarks.support.virtual_load import ARMS, FAR, NEAR, StepLine, run

_STREAMS = (1, 2, 4, 8, 16, 32)
_STEPS = 1500
_MIN_OF_BEST = 0.97


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 64:
        raise click.BadParameter("numbers from 1 to 64, with commas between them")
    return numbers


@click.command("load")
@click.option("--prompts", "prompts_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--streams", callback=_numbers, default=",".join(map(str, _STREAMS)), show_default=True)
@click.option("--blocks", type=click.IntRange(1), default=2, show_default=True, help="Turns of each arm.")
@max_tokens_option(64)
@click.option("--virtual", is_flag=True, help="Reckon it, with the scheduler that ships and steps of --step-line.")
@click.option(
    "--step-line", type=(float, float), default=(12.0, 0.6), show_default=True, help="ms of a step, and of each row."
)
@json_file_option
def load(
    prompts_file: Path | None,
    streams: tuple[int, ...],
    blocks: int,
    max_tokens: int,
    virtual: bool,
    step_line: tuple[float, float],
    json_file: Path | None,
) -> int:
    """Does speculation pay under load, and does auto find out?

    So many streams at once, with speculation off, on and auto in turns: tokens per second of all of them together. With
    --virtual half of the streams are near to what the draft knows and half far from it, and `on` judges every row.
    """
    if virtual:
        line = StepLine(step_line[0] / 1e3, step_line[1] / 1e3)
        return _report({count: _reckoned(line, count) for count in streams}, json_file, {"step_line_ms": step_line})
    if prompts_file is None:
        raise CommandError("--prompts: needed without --virtual")
    return run_async(_measure(read_prompts(prompts_file), streams, blocks, max_tokens, json_file))


def _reckoned(line: StepLine, count: int) -> dict[str, float]:
    texts = [NEAR if number % 2 == 0 else FAR for number in range(count)]
    return {arm: run(line, texts, arm, seconds=_STEPS * line.seconds(count)).goodput for arm in ARMS}


async def _measure(
    prompts: Sequence[Prompt], streams: tuple[int, ...], blocks: int, max_tokens: int, json_file: Path | None
) -> int:
    found: dict[int, dict[str, float]] = {}
    async with Stack(StackConfig(pin=True), note) as stack:
        for count in streams:
            asked = spread(prompts, min(len(prompts), 2 * count))
            tokens, seconds = dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0.0)
            for _, arm in turns(blocks, list(ARMS)):
                started_s = time.monotonic()
                answered = await answers(
                    *(stack.gateway_grpc, stack.config.model, asked, f"{count} streams, {arm}"),
                    speculation=arm,
                    concurrency=count,
                    temperature=0.0,
                    max_tokens=max_tokens,
                )
                seconds[arm] += time.monotonic() - started_s
                tokens[arm] += sum(len(answer.token_ids) for answer in answered)
            found[count] = {arm: tokens[arm] / seconds[arm] for arm in ARMS}
    return _report(found, json_file, {"max_tokens": max_tokens, "blocks": blocks})


def _report(found: dict[int, dict[str, float]], json_file: Path | None, more: dict[str, Any]) -> int:
    show(table(list(_rows(found))))
    figures = {str(count): {arm: round(value, 2) for arm, value in arms.items()} for count, arms in found.items()}
    holds = all(_of_best(arms) >= _MIN_OF_BEST for arms in found.values())
    return finish("load", {"holds": holds, "tokens_per_second": figures, **more}, json_file)


def _of_best(arms: dict[str, float]) -> float:
    return arms["auto"] / max(arms["on"], arms["off"])


def _rows(found: dict[int, dict[str, float]]) -> Iterator[Row]:
    for count, arms in found.items():
        yield {
            "STREAMS": count,
            "OFF TOKENS/S": f"{arms['off']:.1f}",
            "ON / OFF": f"{arms['on'] / arms['off']:.3f}",
            "AUTO / OFF": f"{arms['auto'] / arms['off']:.3f}",
            "AUTO / BEST": f"{_of_best(arms):.3f}",
        }
