"""python -m tests.soak decisions"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import redis
from outrider.metadata.tenants.tenants import DEFAULT_TENANT
from outrider.rpc.v1 import control_pb2, generation_pb2, tenants_pb2
from outrider.target.config import ENGINES
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.ask.hardware import hardware
from outrider_controller.cli.clusters.control import Control, call_control
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.support.asking import max_tokens_option
from tests.soak.kill_pairs import Load, Up, running_stack

ON, OFF = tenants_pb2.SPECULATION_SETTING_ON, tenants_pb2.SPECULATION_SETTING_OFF
_HELD = "held"
"""A tenant without requests, of whom an operator has spoken."""
_QUIET_S, _LIMIT_S = 1.0, 60.0
_MAX_P99_S = 1.0
_KNOWN_ROUNDS = 300
_SAVED_S = 3.0

Decisions = dict[tuple[str, str], tuple[int, int]]
"""Tenant and target → mode, and what an operator has set."""


@dataclass(slots=True)
class Rounds:
    """What clients have seen of all streams together."""

    drafted_s: float = 0.0
    """When the last round came of which drafted tokens were accepted."""
    plain: set[str] = field(default_factory=set)
    """Requests that have had others since."""

    def saw(self, chunk: generation_pb2.StreamGenerateResponse) -> None:
        if chunk.num_accepted:
            self.drafted_s = time.monotonic()
            self.plain.clear()
        else:
            self.plain.add(chunk.id)

    def drafted_since(self, moment_s: float) -> bool:
        return self.drafted_s > moment_s

    def plain_since(self, moment_s: float, streams: int) -> bool:
        """All streams, for a while."""
        return time.monotonic() - max(moment_s, self.drafted_s) > _QUIET_S and len(self.plain) >= streams


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that is taken away, and within how long the same must be decided again."""

    what: str
    within_s: float
    strike: Callable[[Up], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    lost: str
    same_s: float
    """From the loss until the decisions are those from before, and stay so."""
    within_s: float
    requests: int
    """Under way meanwhile."""
    failed: int
    errors: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.same_s <= self.within_s and not self.failed


def _kill(kind: str) -> Callable[[Up], None]:
    return lambda up: os.kill(up.pids(kind)[0], signal.SIGKILL)


def _flush(up: Up) -> None:
    title = " ".join(psutil.Process(up.pids("redis")[0]).cmdline())
    with redis.Redis(unix_socket_path=title.partition("unixsocket:")[2].split()[0]) as raw:
        raw.flushall()


LOSSES = (
    Loss("control plane, kill -9", 5, _kill("control")),
    Loss("Ray driver, kill -9", 15, _kill("controller")),
    Loss("Redis, FLUSHALL", 15, _flush),
    Loss("control plane again, kill -9", 5, _kill("control")),
)


async def say(up: Up, tenant: str, setting: tenants_pb2.SpeculationSetting.ValueType) -> None:
    request = control_pb2.SetSpeculationRequest(tenant=tenant, setting=setting)
    await call_control(up.described["control"], lambda stub: stub.SetSpeculation(request), token=up.token)


async def decisions(up: Up) -> Decisions:
    """Raises CommandError where nobody explains them."""

    async def ask(stub: Control) -> Decisions:
        answers = [await stub.Explain(control_pb2.ExplainRequest(tenant=tenant)) for tenant in (DEFAULT_TENANT, _HELD)]
        return {
            (tenant, one.target): (one.mode, one.override.setting)
            for tenant, answer in zip((DEFAULT_TENANT, _HELD), answers, strict=True)
            for one in answer.decisions
        }

    return await call_control(up.described["control"], ask, token=up.token)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def override_trials(up: Up, rounds: Rounds, streams: int, trials: int) -> list[float]:
    """For each: seconds from the operator's `off` to the last round that a client saw with drafts."""
    took = []
    for number in range(trials):
        await say(up, DEFAULT_TENANT, ON)
        await until(partial(rounds.drafted_since, time.monotonic()))
        said_s = time.monotonic()
        await say(up, DEFAULT_TENANT, OFF)
        await until(partial(rounds.plain_since, said_s, streams))
        took.append(max(0.0, rounds.drafted_s - said_s))
        if not (number + 1) % 20:
            note(f"{number + 1} of {trials}: {statistics.median(took):.2f} s in the median, {max(took):.2f} s at most")
    return took


async def lose(up: Up, load: Load, loss: Loss) -> Outcome:
    before = await decisions(up)
    struck_s = changed_s = time.monotonic()
    loss.strike(up)
    while (now_s := time.monotonic()) - struck_s < _LIMIT_S and now_s - changed_s < loss.within_s + 2:
        try:
            if await decisions(up) != before:
                changed_s = time.monotonic()
        except CommandError:
            changed_s = time.monotonic()
        await asyncio.sleep(0.1)
    await until(lambda: any(one.started_s > changed_s for one in load.ended))
    ended = load.between(struck_s, time.monotonic())
    errors = [one.error for one in ended if one.error]
    return Outcome(
        loss.what,
        round(changed_s - struck_s, 1),
        loss.within_s,
        len(ended),
        len(errors),
        tuple(sorted(set(errors))),
    )


@click.command("decisions")
@click.option("--trials", type=click.IntRange(0), default=200, show_default=True, help="Of an operator's word.")
@click.option("--losses/--no-losses", default=True, show_default=True, help="Kill what decides, and empty Redis.")
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True, help="Under way at any time.")
@click.option("--engine", type=click.Choice(ENGINES), default="outrider", show_default=True, help="Of the targets.")
@click.option("--vllm-python", default="build/vllm/bin/python", show_default=True, help="Of the environment with vLLM.")
@max_tokens_option(128)
@json_file_option
def decisions_command(
    trials: int, losses: bool, streams: int, engine: str, vllm_python: str, max_tokens: int, json_file: Path | None
) -> int:
    """What an operator says holds within a second; what was decided outlives who decided it.

    A stack with tiny models, two of each worker, under load. An operator puts the tenant on and off: how long until the
    last round with drafts? Then the control plane, the Ray driver and all that Redis holds are lost: no request may
    fail, and the same is decided again within 5, 15 and 15 s.
    """
    more = {} if engine == "outrider" else {"engine": engine, "vllm_python": vllm_python}
    return run_async(_run(trials, losses, streams, max_tokens, json_file, more))


async def _run(
    trials: int, losses: bool, streams: int, max_tokens: int, json_file: Path | None, more: dict[str, str]
) -> int:
    with tempfile.TemporaryDirectory(prefix="decisions-") as scratch:
        # vLLM's attention for CPUs has no smaller heads.
        model = str(tiny_checkpoint(Path(scratch) / "tiny", max_context_len=4096, head_dim=32))
        async with running_stack(model, Path(scratch) / "stack", Path(scratch) / "cache", **more) as up:
            took, outcomes = await measure(up, streams, max_tokens, trials, LOSSES if losses else ())
    holds = all(one.holds for one in outcomes)
    body: dict[str, Any] = {"outcomes": [{**asdict(one), "holds": one.holds} for one in outcomes]}
    if took:
        p99_s = sorted(took)[max(0, round(0.99 * len(took)) - 1)]
        holds &= p99_s <= _MAX_P99_S
        click.echo(
            f"last round with drafts after the operator's word: {statistics.median(took):.3f} s in the median, "
            f"{p99_s:.3f} s at p99, {max(took):.3f} s at most, {len(took)} times"
        )
        body |= {"override_s": took, "override_p99_s": p99_s}
    if outcomes:
        header = ("LOST", "THE SAME AFTER", "BAR", "REQUESTS", "FAILED", "")
        rows = [
            (o.lost, f"{o.same_s} s", f"{o.within_s:g} s", o.requests, o.failed, "" if o.holds else "DOES NOT HOLD")
            for o in outcomes
        ]
        click.echo(columns(header, rows))
    write_json(json_file, "decisions", {"holds": holds, **body, "hardware": hardware()})
    return ExitCode.OK if holds else ExitCode.ERROR


async def measure(
    up: Up, streams: int, max_tokens: int, trials: int, losses: tuple[Loss, ...]
) -> tuple[list[float], list[Outcome]]:
    rounds, outcomes = Rounds(), list[Outcome]()
    load = Load(up.described["grpc"], up.described["model"], max_tokens, on_chunk=rounds.saw)
    async with load.running(streams):
        await until(lambda: len(load.ended) >= streams)
        took = await override_trials(up, rounds, streams, trials)
        if losses:
            await say(up, DEFAULT_TENANT, tenants_pb2.SPECULATION_SETTING_AUTO)
            await say(up, _HELD, OFF)
            ended = len(load.ended)
            await until(lambda: len(load.ended) > ended + 10 * streams)
            # Evidence is written every 2 s.
            await asyncio.sleep(_SAVED_S)
        for loss in losses:
            outcomes.append(outcome := await lose(up, load, loss))
            note(f"{outcome.lost}: the same after {outcome.same_s} s, {outcome.failed} of {outcome.requests} failed")
            for error in outcome.errors:
                note(f"    {error}")
    return took, outcomes
