"""python -m benchmarks what-if"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from outrider.rpc.v1 import trace_pb2
from outrider_controller.cli.drafts.what_if import question_of
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.show.trace.command import exported
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async
from outrider_controller.whatif.forecast import Fleet
from outrider_controller.whatif.recorded import Recording

from benchmarks.report import finish, show, table
from benchmarks.support.asking import answers, max_tokens_option
from benchmarks.support.prompts import Prompt, prompts_option, read_prompts, spread
from benchmarks.support.stacks import added_round_trip, delayed, unpriced_targets
from benchmarks.support.tenants import make_tenants
from benchmarks.support.unpriced_target import BY_PRICE, EVERY_ROW

_BAR = 0.1
_RECORDED_AT, _STREAMS = (2, 8), 4
_TENANTS = ("inside", "outside")
_MIX = {"inside": 3.0, "outside": 1.0}
_STOP_GRACE_S = 5.0
_OUTSIDE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is changed: on the stack, and in the question."""

    name: str
    streams: int = _STREAMS
    cap: int | None = None
    mix: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_TENANTS, 1.0))
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options of `outrider plan --what-if`."""


SETTINGS = (
    Setting("another number of streams"),
    Setting("another cap", cap=2, asked={"max_draft_tokens": 2}),
    Setting("another mix", mix=_MIX, asked={"mix": _MIX}),
    Setting("no price", asked={"row_price": False}),
    Setting("5 ms more", asked={"rtt": 0.005}),
    Setting("one draft worker fewer", asked={"drafts": 0}),
)


@click.command("what-if")
@prompts_option
@click.option(
    "--tenants", "outside_file", type=_OUTSIDE, required=True, metavar="FILE", help="Prompts of another tenant."
)
@click.option("--requests", type=click.IntRange(4), default=24, show_default=True, help="In each turn.")
@click.option("--blocks", type=click.IntRange(1), default=4, show_default=True, help="Turns of every setting.")
@max_tokens_option(96)
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), help="Also keep the recorded rounds here.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Virtual runs of each setting.")
@json_file_option
def what_if(
    prompts_file: Path,
    outside_file: Path,
    requests: int,
    blocks: int,
    max_tokens: int,
    record: Path | None,
    repeats: int,
    json_file: Path | None,
) -> int:
    """How near is `outrider plan --what-if` to what a stack does?

    A stack answers requests of two tenants at 2 and at 8 streams, and their rounds are exported. From these alone six
    other settings are predicted: 4 streams; then with these a cap of 2, another mix of tenants, every row whatever its
    price, 5 ms more between target and draft, and no draft worker. Each is measured in turns with the recording, tokens
    per second. They must be within 10 % of each other.
    """
    texts = {"inside": read_prompts(prompts_file), "outside": read_prompts(outside_file)}
    return run_async(_compared(texts, requests, blocks, max_tokens, record, repeats, json_file))


async def _compared(
    texts: Mapping[str, Sequence[Prompt]],
    requests: int,
    blocks: int,
    max_tokens: int,
    record: Path | None,
    repeats: int,
    json_file: Path | None,
) -> int:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as scratch:
        file = record or Path(scratch) / "rounds.jsonl"
        file.write_text("")
        async with _stack(Path(scratch) / "line.json") as stack:
            asking = _Asking(stack, await make_tenants(stack, _TENANTS), texts, requests, max_tokens)
            measured: dict[str, list[_Measured]] = {setting.name: [] for setting in SETTINGS}
            for _ in range(blocks):
                await _record(asking, file)
                for setting in SETTINGS:
                    async with _CHANGES.get(setting.name, _unchanged)(stack):
                        measured[setting.name].append(await asking.measured(setting))
        recording = Recording.read(file)
    rows = [_row(recording, setting, measured[setting.name], repeats) for setting in SETTINGS]
    show(table([{name.upper(): str(value) for name, value in row.items()} for row in rows]))
    holds = all(abs(row["ratio"] - 1) <= _BAR for row in rows)
    return finish("what-if", {"holds": holds, "settings": rows, "requests": requests, "blocks": blocks}, json_file)


async def _record(asking: _Asking, file: Path) -> None:
    for streams in _RECORDED_AT:
        found = await asking.measured(Setting(f"recording, {streams} streams", streams))
        with file.open("a") as lines:
            async for line in exported(asking.stack.control, trace_pb2.ExportTracesRequest(request_ids=found.ids)):
                lines.write(f"{line}\n")


def _row(recording: Recording, setting: Setting, measured: Sequence[_Measured], repeats: int) -> dict[str, Any]:
    note(f"predicts: {setting.name}")
    asked = {"drafts": 1, "repeats": repeats, **setting.asked}
    predicted = question_of(recording, asked).answer(Fleet(setting.streams, 1, asked["drafts"])).drafted.tokens_per_s
    real = sum(one.tokens for one in measured) / sum(one.seconds for one in measured)
    return {
        "setting": setting.name,
        "predicted": round(predicted, 1),
        "measured": round(real, 1),
        "ratio": round(predicted / real, 3),
    }


@asynccontextmanager
async def _stack(line_file: Path) -> AsyncIterator[Stack]:
    def amend(plan: StackPlan, ports: Ports) -> StackPlan:
        return delayed(replace(plan, targets=unpriced_targets(plan.targets, line_file)), ports)

    # Without cached prefixes: each prompt is asked in every setting.
    config = StackConfig(pin=True, target_args="--no-prefix-cache", draft_args="--no-prefix-cache")
    async with Stack(config, note, amend) as stack:
        yield stack


@asynccontextmanager
async def _unchanged(stack: Stack) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def _unpriced(stack: Stack) -> AsyncIterator[None]:
    os.kill(stack.processes["target-0"].pid, EVERY_ROW)
    yield
    os.kill(stack.processes["target-0"].pid, BY_PRICE)


@asynccontextmanager
async def _farther(stack: Stack) -> AsyncIterator[None]:
    await added_round_trip(stack, 5.0)
    yield
    await added_round_trip(stack, 0.0)


@asynccontextmanager
async def _without_draft(stack: Stack) -> AsyncIterator[None]:
    await stack.processes["draft-0"].stop(_STOP_GRACE_S)
    yield
    await stack.restart("draft-0")
    await stack.assembled()


_CHANGES: Mapping[str, Callable[[Stack], AbstractAsyncContextManager[None]]] = {
    "no price": _unpriced,
    "5 ms more": _farther,
    "one draft worker fewer": _without_draft,
}


@dataclass(frozen=True, slots=True)
class _Measured:
    ids: Sequence[str]
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Asking:
    stack: Stack
    keys: Mapping[str, str]
    texts: Mapping[str, Sequence[Prompt]]
    requests: int
    max_tokens: int

    async def measured(self, setting: Setting) -> _Measured:
        asked = self._asked(setting.mix)
        options: dict[str, Any] = {} if setting.cap is None else {"max_draft_tokens": setting.cap}
        started_s = time.monotonic()
        answered = await answers(
            *(self.stack.gateway_grpc, self.stack.config.model, [prompt for _, prompt in asked], setting.name),
            speculation="auto",
            concurrency=setting.streams,
            keys=[self.keys[tenant] for tenant, _ in asked],
            temperature=0.0,
            max_tokens=self.max_tokens,
            **options,
        )
        took_s = time.monotonic() - started_s
        # The last requests run beside fewer than `streams`: a stream's time ends with its own last request.
        busy_s = sum(answer.seconds for answer in answered) / setting.streams
        tokens = sum(len(answer.token_ids) for answer in answered)
        return _Measured([answer.id for answer in answered], tokens, min(took_s, busy_s))

    def _asked(self, mix: Mapping[str, float]) -> list[tuple[str, Prompt]]:
        total = sum(mix.values())
        counts = {tenant: round(self.requests * weight / total) for tenant, weight in mix.items()}
        asked = [(tenant, prompt) for tenant, n in counts.items() for prompt in _many(self.texts[tenant], n)]
        random.Random(1).shuffle(asked)
        return asked


def _many(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    found = spread(prompts, min(count, len(prompts)))
    return [found[number % len(found)] for number in range(count)]
