"""python -m benchmarks load"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.arms import turns
from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import answers, max_tokens_option
from benchmarks.support.prompts import Prompt, read_prompts, spread
from benchmarks.support.stacks import unpriced_targets
from benchmarks.support.tenants import make_tenants
from benchmarks.support.unpriced_target import BY_PRICE, EVERY_ROW, read_line
from benchmarks.support.virtual_load import ARMS, StepLine, run

_STREAMS = (1, 2, 4, 8, 16, 32)
# Measured: as precise as a run on a busy machine allows. Virtual time has no noise.
_MIN_OF_BEST, _MIN_OF_BEST_VIRTUAL = 0.97, 0.99
# With differing texts, auto must beat both on and off by this factor, at this many of the numbers of streams.
_GAIN, _MIN_GAINS = 1.05, 2
_TENANTS = ("inside", "outside")

PathOption = click.Path(exists=True, dir_okay=False, path_type=Path)
Reckoned = dict[int, dict[str, float]]
"""Streams → arm → tokens per second."""


@dataclass(slots=True)
class Blocks:
    """The results of each arm in each block, for one number of streams."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})

    def add(self, arm: str, tokens: int, seconds: float) -> None:
        self.tokens[arm].append(tokens)
        self.seconds[arm].append(seconds)

    def rates(self, chosen: Sequence[int] | None = None) -> dict[str, float]:
        """Tokens per second by arm, of these blocks or of all."""
        chosen = range(len(self.tokens["off"])) if chosen is None else chosen
        return {
            arm: sum(self.tokens[arm][n] for n in chosen) / sum(self.seconds[arm][n] for n in chosen) for arm in ARMS
        }

    def of_best(self, draws: int = 2000) -> tuple[float, float, float]:
        """(lower bound, auto ÷ the better of off and on, upper bound): a 90 % bootstrap interval over blocks."""
        draw, blocks = random.Random(0), range(len(self.tokens["off"]))
        drawn = sorted(of_best(self.rates(draw.choices(blocks, k=len(blocks)))) for _ in range(draws))
        return drawn[draws // 20], of_best(self.rates()), drawn[-draws // 20]


def of_best(rates: Mapping[str, float]) -> float:
    return rates["auto"] / max(rates["on"], rates["off"])


def verdict(low: float, high: float) -> str:
    """Whether the ratio's interval is above its bar, below it, or neither."""
    if low >= _MIN_OF_BEST:
        return "holds"
    return "does not hold" if high < _MIN_OF_BEST else "open"


def reckoned_holds(found: Reckoned) -> bool:
    ratios = [of_best(rates) for rates in found.values()]
    return min(ratios) >= _MIN_OF_BEST_VIRTUAL and sum(ratio >= _GAIN for ratio in ratios) >= _MIN_GAINS


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 64:
        raise click.BadParameter("numbers from 1 to 64, with commas between them")
    return numbers


@click.command("load")
@click.option("--prompts", "prompts_file", type=PathOption, metavar="FILE")
@click.option(
    "--tenants", "outside_file", type=PathOption, metavar="FILE", help="Prompts of another tenant: half of the streams."
)
@click.option("--streams", callback=_numbers, default=",".join(map(str, _STREAMS)), show_default=True)
@click.option("--blocks", type=click.IntRange(1), default=5, show_default=True, help="Turns of each arm.")
@max_tokens_option(64)
@click.option("--virtual", is_flag=True, help="Only reckon it, with the scheduler that ships and steps of --step-line.")
@click.option(
    "--step-line", type=(float, float), default=(12.0, 0.6), show_default=True, help="ms of a step, and of each row."
)
@json_file_option
def load(
    prompts_file: Path | None,
    outside_file: Path | None,
    streams: tuple[int, ...],
    blocks: int,
    max_tokens: int,
    virtual: bool,
    step_line: tuple[float, float],
    json_file: Path | None,
) -> int:
    """Does speculation pay under load, and does auto find out?

    So many streams at once, with speculation off, on and auto in turns: tokens per second of all of them together. `on`
    runs every drafted row, whatever it costs. With --tenants a file whose text the draft cannot guess makes half of the
    streams. Then the same is reckoned in virtual time from the step that was measured, as with --virtual: half of the
    streams are near to what the draft knows and half far from it.
    """
    if virtual:
        line = StepLine(step_line[0] / 1e3, step_line[1] / 1e3)
        return _report({}, _reckoned(line, streams), line, json_file)
    if prompts_file is None:
        raise CommandError("--prompts: needed without --virtual")
    outside = read_prompts(outside_file) if outside_file is not None else []
    found, line = run_async(_measure(read_prompts(prompts_file), outside, streams, blocks, max_tokens))
    # Virtual time has an event loop of its own.
    return _report(found, _reckoned(line, _STREAMS), line, json_file, max_tokens=max_tokens, blocks=blocks)


def _reckoned(line: StepLine, streams: Sequence[int]) -> Reckoned:
    return {count: {arm: run(line, count, arm).tokens_per_s for arm in ARMS} for count in streams}


def asked_of(inside: Sequence[Prompt], outside: Sequence[Prompt], count: int) -> list[tuple[str, Prompt]]:
    """(tenant, prompt): equally many of each tenant, in turns; without prompts outside, all of one."""
    if not outside:
        return [(_TENANTS[0], prompt) for prompt in spread(inside, min(len(inside), 2 * count))]
    each = min(len(inside), len(outside), max(1, count))
    both = zip(spread(inside, each), spread(outside, each), strict=True)
    return [one for pair in both for one in zip(_TENANTS, pair, strict=True)]


async def _measure(
    inside: Sequence[Prompt],
    outside: Sequence[Prompt],
    streams: tuple[int, ...],
    blocks: int,
    max_tokens: int,
) -> tuple[dict[int, Blocks], StepLine]:
    found: dict[int, Blocks] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        line_file = Path(scratch) / "line.json"
        async with _stack(line_file) as stack:
            # An arm has tenants of its own: auto would learn from rows that `on` runs at no price.
            keys = await make_tenants(stack, [f"{arm}-{tenant}" for arm in ARMS for tenant in _TENANTS])
            for count in streams:
                asked = asked_of(inside, outside, count)
                found[count] = await _blocks(stack, asked, keys, count, blocks, max_tokens)
            _switch(stack, priced=True)
        return found, read_line(line_file)


@asynccontextmanager
async def _stack(line_file: Path) -> AsyncIterator[Stack]:
    def amend(plan: StackPlan, ports: Ports) -> StackPlan:
        return replace(plan, targets=unpriced_targets(plan.targets, line_file))

    async with Stack(StackConfig(pin=True), note, amend) as stack:
        yield stack


def _switch(stack: Stack, *, priced: bool) -> None:
    """Switches whether the target runs only the rows that are worth their price."""
    os.kill(stack.processes["target-0"].pid, BY_PRICE if priced else EVERY_ROW)


async def _blocks(
    stack: Stack, asked: Sequence[tuple[str, Prompt]], keys: Mapping[str, str], count: int, blocks: int, max_tokens: int
) -> Blocks:
    found = Blocks()
    for _, arm in turns(blocks, list(ARMS)):
        _switch(stack, priced=arm != "on")
        started_s = time.monotonic()
        answered = await answers(
            *(stack.gateway_grpc, stack.config.model, [prompt for _, prompt in asked], f"{count} streams, {arm}"),
            speculation=arm,
            concurrency=count,
            keys=[keys[f"{arm}-{tenant}"] for tenant, _ in asked],
            temperature=0.0,
            max_tokens=max_tokens,
        )
        found.add(arm, sum(len(answer.token_ids) for answer in answered), time.monotonic() - started_s)
    return found


def _report(
    found: Mapping[int, Blocks], reckoned: Reckoned, line: StepLine, json_file: Path | None, **more: Any
) -> int:
    intervals = {count: blocks.of_best() for count, blocks in found.items()}
    measured = [_measured_row(count, found[count].rates(), interval) for count, interval in intervals.items()]
    show(
        table(measured) if measured else "",
        f"In virtual time, a step of {1e3 * line.base_s:.2f} ms and {1e3 * line.row_s:.3f} ms a row:",
        table([_row(count, rates) for count, rates in reckoned.items()]),
        "" if reckoned_holds(reckoned) else "In virtual time it does not hold.",
    )
    body = {
        "holds": reckoned_holds(reckoned) and all(high >= _MIN_OF_BEST for _, _, high in intervals.values()),
        "tokens_per_second": _rounded({count: blocks.rates() for count, blocks in found.items()}),
        "of_best": {str(count): [round(one, 4) for one in interval] for count, interval in intervals.items()},
        "virtual": _rounded(reckoned),
        "step_line_ms": [1e3 * line.base_s, 1e3 * line.row_s],
    }
    return finish("load", {**body, **more}, json_file)


def _rounded(found: Reckoned) -> dict[str, dict[str, float]]:
    return {str(count): {arm: round(value, 2) for arm, value in rates.items()} for count, rates in found.items()}


def _measured_row(count: int, rates: Mapping[str, float], interval: tuple[float, float, float]) -> Row:
    low, _, high = interval
    return {**_row(count, rates), "90 %": f"{low:.3f} to {high:.3f}", "BAR": verdict(low, high)}


def _row(count: int, rates: Mapping[str, float]) -> Row:
    return {
        "STREAMS": count,
        "OFF TOKENS/S": f"{rates['off']:.1f}",
        "ON / OFF": f"{rates['on'] / rates['off']:.3f}",
        "AUTO / OFF": f"{rates['auto'] / rates['off']:.3f}",
        "AUTO / BEST": f"{of_best(rates):.3f}",
    }
