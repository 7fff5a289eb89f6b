"""python -m benchmarks latency"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.rpc.channel import create_channel
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.stack import Stack, unamended
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async, stack_options
from outrider_controller.control.api.rows import worker_rows

from benchmarks.arms import Ask, Sample, Samples, compared, summary, take_turns
from benchmarks.report import Row, finish, show, table
from benchmarks.support.asking import by_category, count_option, make_request, max_tokens_option, mean
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.stacks import added_round_trip, delayed, outside_cores, replace_drafts

ARMS = ("off", "auto", "on")
"""Speculation modes of requests."""
_CHANGES = {"good": "", "wrong": "wrong", "stalls": "stalls", "dies": ""}
"""Draft → its benchmarks.support.changed_draft."""
_LIFE_S = 5.0
_PROBES = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a measurement that all conditions share."""

    prompts: Sequence[Prompt]
    arms: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool
    block: int


@dataclass(frozen=True, slots=True)
class Condition:
    """The draft's behaviour and the added round trip of a measurement."""

    draft: str
    added_ms: float | None

    @property
    def label(self) -> str:
        way = "" if self.added_ms is None else f"{self.added_ms:g} ms"
        return " ".join(filter(None, [self.draft if self.draft != "good" else "", way])) or "prompts"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound on the ratio of two arms' figures."""

    arm: str
    base: str
    figure: str
    bound: float


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    ratio: float

    @property
    def holds(self) -> bool:
        return self.ratio >= self.bar.bound

    def __str__(self) -> str:
        bar = self.bar
        said = "holds" if self.holds else "FALLS SHORT"
        return f"{bar.arm} / {bar.base}, {bar.figure.replace('_', ' ')}: {self.ratio:.3f} (at least {bar.bound}) {said}"


def bars_of(condition: Condition, arms: Sequence[str]) -> list[Bar]:
    """The bars: bad drafts and long round trips against plain decoding."""
    least = 0.95 if condition.draft != "good" else 0.98 if condition.added_ms is not None else None
    plain = [] if least is None else [Bar("auto", "off", "tokens_per_second", least)]
    return [bar for bar in plain if bar.arm in arms and bar.base in arms]


def _delays(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float | None, ...]:
    if value is None:
        return (None,)
    try:
        delays = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("must be numbers, separated by commas") from None
    if not all(0 <= delay <= 1000 for delay in delays):
        raise click.BadParameter("each must be in 0 to 1000")
    return delays


@click.command("latency")
@prompts_option
@count_option(40)
@max_tokens_option(128)
@click.option(
    "--arm", "arms", type=click.Choice(ARMS), multiple=True, default=("off", "auto"), show_default=True,
    help="May be given several times; the others are compared with the first.",
)  # fmt: skip
@click.option(
    "--added-ms", default=None, callback=_delays, metavar="MS,MS,…", help="Round trips to workers, by a proxy, in turn."
)
@click.option(
    "--draft", "behaviours", type=click.Choice(tuple(_CHANGES)), multiple=True, default=("good",), show_default=True,
    help="One after the other.",
)  # fmt: skip
@click.option("--ignore-eos/--no-ignore-eos", default=False, show_default=True, help="All answers of full length.")
@click.option("--block", type=click.IntRange(1), default=1, show_default=True, help="Prompts of an arm's turn.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=False, show_default=True, help="Cached prompts hide prefill times."
)
@stack_options(pin=True)
@json_file_option
def latency(
    config: StackConfig,
    prompts_file: Path,
    num_prompts: int,
    max_tokens: int,
    arms: tuple[str, ...],
    added_ms: tuple[float | None, ...],
    behaviours: tuple[str, ...],
    ignore_eos: bool,
    block: int,
    prefix_cache: bool,
    json_file: Path | None,
) -> int:
    """How much faster is one stream with speculation than without?

    Greedy, one stream: each prompt is answered by every arm, one right after the other, and which comes first
    alternates. Ratios of tokens/s: of whole requests, prefill included, and from the first token to the last.

    With --added-ms, speculation must not fall under 0.98 of plain. A draft that is `wrong` in every token, `stalls` for
    200 ms at random, or `dies` 5 s after it came, must not cost more than 5 %.
    """
    if len(set(arms)) < 2:
        raise click.UsageError("--arm: at least two, to be compared")
    if not config.drafts and set(behaviours) != {"good"}:
        raise click.UsageError("--drafts 0 leaves no draft worker to change")
    prompts = spread(read_prompts(prompts_file), num_prompts)
    asked = Asked(prompts, tuple(dict.fromkeys(arms)), max_tokens, ignore_eos, block)
    conditions = [Condition(draft, added) for draft, added in product(behaviours, added_ms)]
    if not prefix_cache:
        target_args, draft_args = (f"{args} --no-prefix-cache" for args in (config.target_args, config.draft_args))
        config = replace(config, target_args=target_args, draft_args=draft_args)
    found = run_async(_measured(config, asked, conditions))
    show(
        table([row for one in found for row in rows(one, with_categories=len(found) == 1)]), "\n".join(_verdicts(found))
    )
    about = {
        "arms": asked.arms,
        "max_tokens": max_tokens,
        "prefix_cache": prefix_cache,
        "ignore_eos": ignore_eos,
    }
    holds = all(one["holds"] for one in found)
    return finish("latency", {"holds": holds, **about, "block": block, "conditions": found}, json_file)


async def _measured(config: StackConfig, asked: Asked, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    amend = delayed if any(condition.added_ms is not None for condition in conditions) else unamended
    async with AsyncExitStack() as exits:
        enter = exits.enter_async_context
        stack = await enter(Stack(config, note, amend))
        gateway = await enter(Gateway(stack.gateway_grpc))
        arms = {arm: _through(gateway, config.model, arm, asked.ignore_eos) for arm in asked.arms}
        found = []
        for condition in conditions:
            await prepare(stack, condition)
            measured_ms = await _round_trip_ms(stack) if condition.added_ms is not None else None
            async with _dying(stack, condition.draft == "dies") as deaths:
                with outside_cores(stack):
                    samples = await _sampled(asked, arms, condition)
            about = {**asdict(condition), "measured_ms": measured_ms, "deaths": len(deaths)}
            found.append({**about, **outcome(asked.prompts, samples, condition)})
        return found


async def _sampled(asked: Asked, arms: dict[str, Ask], condition: Condition) -> Samples:
    prompts = [prompt.text for prompt in asked.prompts]
    return await take_turns(prompts, arms, asked.max_tokens, condition.label, asked.block)


def _through(gateway: Gateway, model: str, mode: str, ignore_eos: bool) -> Ask:
    async def ask(prompt: str, max_tokens: int) -> Sample:
        options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": ignore_eos}
        return Sample.of(await gateway.answer(make_request(model, prompt, mode, **options)))

    return ask


async def prepare(stack: Stack, condition: Condition) -> None:
    """Gives the stack the condition's drafts and round trip."""
    drafts = [stack.processes[f"draft-{number}"] for number in range(stack.config.drafts)]
    if condition.draft != "good" or any(draft.spec.argv[2] != "outrider.draft" for draft in drafts):
        await replace_drafts(stack, stack.config.draft, _CHANGES[condition.draft])
    if condition.added_ms is not None:
        await added_round_trip(stack, condition.added_ms)


async def _round_trip_ms(stack: Stack) -> float:
    """Round trip to the target on the router's path: the shortest of a few health checks."""
    address = next(row["address"] for row in worker_rows(await stack.workers()) if row["role"] == "target")
    took_s = []
    async with create_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(_PROBES):
            started_s = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            took_s.append(time.monotonic() - started_s)
    return round(min(took_s) * 1e3, 2)


@asynccontextmanager
async def _dying(stack: Stack, wanted: bool) -> AsyncIterator[list[int]]:
    """During the block, kills the draft `_LIFE_S` after each start and restarts it. Yields the pids killed so far."""
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
        # The task may have been cancelled between kill and restart.
        await stack.restart("draft-0")
        await stack.assembled()


async def _kill_again_and_again(stack: Stack, deaths: list[int]) -> None:
    while True:
        await asyncio.sleep(_LIFE_S)
        process = stack.processes["draft-0"]
        deaths.append(process.pid)
        process.stopping = True
        process.kill()
        await stack.restart("draft-0")


def outcome(prompts: Sequence[Prompt], samples: Samples, condition: Condition) -> dict[str, Any]:
    """The results of one condition."""
    base = next(iter(samples))
    parts = {arm: by_category(prompts, taken) for arm, taken in samples.items()}
    categories = {name: _part({arm: part[name] for arm, part in parts.items()}) for name in parts[base]}
    whole = _part(samples)
    arms = whole["arms"]
    bars = bars_of(condition, list(samples))
    verdicts = [Verdict(bar, round(arms[bar.arm][bar.figure] / arms[bar.base][bar.figure], 4)) for bar in bars]
    # A bad draft may cost time, but must never change a token.
    exact = condition.draft == "good" or all(one["texts_equal"] == len(prompts) for one in whole["compared"].values())
    return {
        "holds": exact and all(verdict.holds for verdict in verdicts),
        "verdicts": [{**asdict(verdict.bar), "ratio": verdict.ratio, "holds": verdict.holds} for verdict in verdicts],
        "all": whole,
        "mean_over_categories": {
            arm: {
                name: round(mean([part["compared"][arm][name] for part in categories.values()]), 4)
                for name in ("request_speedup", "decode_speedup")
            }
            for arm in whole["compared"]
        },
        "categories": categories,
    }


def _part(samples: Samples) -> dict[str, Any]:
    base, *others = samples
    return {
        "arms": {arm: summary(taken) for arm, taken in samples.items()},
        "compared": {arm: compared(samples[base], samples[arm]) for arm in others},
    }


def rows(found: dict[str, Any], *, with_categories: bool) -> Iterator[Row]:
    """One row per category, if wanted, then their mean and the total; for each arm except the base."""
    about = {
        "DRAFT": found["draft"] if found["draft"] != "good" else None,
        "DEATHS": found["deaths"] or None,
        "ADDED MS": None if found["added_ms"] is None else f"{found['added_ms']:g}",
        "ROUND TRIP MS": None if found["measured_ms"] is None else f"{found['measured_ms']:.1f}",
    }
    base, *others = found["all"]["arms"]
    # The base's figures are in the row of a single other arm, but get a row of their own next to several.
    for arm in others if len(others) == 1 else (base, *others):
        for name, part in found["categories"].items() if with_categories else ():
            yield {**about, "CATEGORY": name, **_cells(part, arm)}
        if with_categories and arm != base:
            means = found["mean_over_categories"][arm]
            cells = {"×": f"{means['request_speedup']:.2f}", "DECODE ×": f"{means['decode_speedup']:.2f}"}
            yield {**about, "CATEGORY": "mean", "ARM": arm, **cells}
        yield {**about, "CATEGORY": "all" if with_categories else None, **_cells(found["all"], arm)}


def _cells(part: dict[str, Any], arm: str) -> Row:
    base, figures = next(iter(part["arms"])), part["arms"][arm]
    beside_one = len(part["arms"]) == 2
    return {
        f"{base.upper()} TOKENS/S": f"{part['arms'][base]['tokens_per_second']:.1f}" if beside_one else None,
        "ARM": arm,
        "TOKENS/S": f"{figures['tokens_per_second']:.1f}",
        **(_ratio_cells(part["compared"][arm]) if arm != base else {}),
        "ACCEPTANCE": f"{figures['acceptance']:.2f}",
        "TOKENS/ROUND": f"{figures['tokens_per_round']:.2f}",
        "DECODE MS/ROUND": f"{figures['decode_round_ms']:.2f}",
        "ROUND MS": f"{figures['round_ms']:.1f}",
        "DRAFT MS": f"{figures['draft_ms']:.1f}",
        "WIRE": f"{figures['wire_ms']:.1f}",
        "VERIFY": f"{figures['verify_ms']:.1f}",
        "STOLEN": f"{100 * max(one['stolen'] for one in part['arms'].values()):.1f} %"
        if beside_one
        else f"{100 * figures['stolen']:.1f} %",
    }


def _ratio_cells(ratios: dict[str, Any]) -> Row:
    return {
        "×": f"{ratios['request_speedup']:.2f}",
        "MEDIAN ×": f"{ratios['median_ratio']:.2f}",
        "DECODE ×": f"{ratios['decode_speedup']:.2f}",
        "TEXTS EQUAL": f"{ratios['texts_equal']} of {ratios['num_prompts']}",
    }


def _verdicts(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for one in found:
        label = Condition(one["draft"], one["added_ms"]).label
        for given in one["verdicts"]:
            given = dict(given)
            ratio, _ = given.pop("ratio"), given.pop("holds")
            yield f"{label}: {Verdict(Bar(**given), ratio)}"
