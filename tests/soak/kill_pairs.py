"""python -m tests.soak kill-pairs"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from outrider.hardware import hardware
from outrider.model_names import served_name
from outrider.rpc.v1 import worker_pb2
from outrider_controller.cli.client import Gateway, OnChunk
from outrider_controller.cli.clusters.control import list_models, list_workers
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.models import located
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.stack_options import run_async

from benchmarks.support.asking import make_request, max_tokens_option

_TINY = "tiny"
_APART_S = 1.0
_SERVED_WITHIN_S = 30.0
_WHOLE_WITHIN_S = 120.0
_STEADY_S = 3.0
_REQUEST_TIMEOUT_S = 120.0
_WORKERS = 2
"""Of each kind of which there may be several."""
_PROMPTS = ("Once upon a time", "Why is the sky blue?", "List the planets.", "Write a haiku about the sea.")

# Kind → how many of it there are. Ray's two servers are processes that can die, too.
KINDS = {
    "redis": 1,
    "target": _WORKERS,
    "draft": _WORKERS,
    "router": _WORKERS,
    "gateway": 1,
    "controller": 1,
    "control": 1,
    "raylet": 1,
    "gcs_server": 1,
}
# Without these nobody can answer for a while. All else must cost no request, if one of its kind lives on.
_NEEDED = ("target", "router", "gateway")
# Routers live and die with them.
_HOLDS_ROUTERS = ("controller", "raylet", "gcs_server")


@dataclass(frozen=True, slots=True)
class Blow:
    """One or two processes of these kinds are ended by SIGKILL, one after the other."""

    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return " + ".join(self.kinds)

    @property
    def leaves_one_of_each(self) -> bool:
        """Whether a request can be served throughout."""
        counts = {kind: self.kinds.count(kind) for kind in _NEEDED}
        return all(counts[kind] < KINDS[kind] for kind in _NEEDED) and not set(self.kinds) & set(_HOLDS_ROUTERS)


def all_blows() -> list[Blow]:
    """Each kind alone, and each pair: of one kind too, where there are two."""
    alone = [Blow((kind,)) for kind in KINDS]
    pairs = [Blow(pair) for pair in itertools.combinations(KINDS, 2)]
    return [*alone, *pairs, *(Blow((kind, kind)) for kind, count in KINDS.items() if count > 1)]


@dataclass(frozen=True, slots=True)
class Request:
    """How one ended. Times are this process's monotonic clock."""

    started_s: float
    ended_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Outcome:
    killed: str
    served_s: float
    """From the last kill to the end of the first answer that was asked for after it."""
    whole_s: float
    """From the last kill until every process is back and known to all."""
    requests: int
    failed: int
    longest_s: float
    """The slowest answer that was under way."""
    errors: tuple[str, ...]
    may_fail: bool

    @property
    def holds(self) -> bool:
        return (
            self.served_s <= _SERVED_WITHIN_S and self.whole_s < _WHOLE_WITHIN_S and (self.may_fail or not self.failed)
        )


@dataclass(slots=True)
class Load:
    """Streams that ask again and again, as clients with a little patience do."""

    address: str
    model: str
    max_tokens: int
    ended: list[Request] = field(default_factory=list)
    on_chunk: OnChunk = lambda chunk: None

    @asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._stream(number)) for number in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, number: int) -> None:
        for prompt in itertools.cycle((*_PROMPTS[number % len(_PROMPTS) :], *_PROMPTS[: number % len(_PROMPTS)])):
            request = make_request(self.model, prompt, "auto", max_tokens=self.max_tokens, ignore_eos=True)
            started_s, error = time.monotonic(), ""
            # A connection for each: one that was broken waits before it is made again.
            async with Gateway(self.address) as gateway:
                try:
                    answer = await gateway.answer(request, _REQUEST_TIMEOUT_S, self.on_chunk)
                    if len(answer.token_ids) != self.max_tokens:
                        error = f"{len(answer.token_ids)} tokens"
                except CommandError as failure:
                    error = str(failure)
            self.ended.append(Request(started_s, time.monotonic(), error))
            if error:
                await asyncio.sleep(0.5)

    def between(self, first_s: float, last_s: float) -> list[Request]:
        """Those that were under way in that time, and have ended."""
        return [one for one in self.ended if one.ended_s >= first_s and one.started_s <= last_s]


@dataclass(slots=True)
class Up:
    """A running `outrider up`, seen from outside."""

    process: asyncio.subprocess.Process
    console_log: Path
    """What it writes to the console."""
    described: dict[str, Any]

    def pids(self, kind: str) -> list[int]:
        """Of the processes of a kind that live now."""
        return sorted(one.pid for one in self._family() if _kind(one) == kind)

    def _family(self) -> Iterator[psutil.Process]:
        with suppress(psutil.Error):
            yield from psutil.Process(self.process.pid).children(recursive=True)

    @property
    def token(self) -> str:
        state = self.console_log.parent / "state" / str(self.described["context"])
        return (state / "operator-token").read_text()

    async def is_whole(self) -> bool:
        """Whether every process is there and each router uses every worker."""
        if any(len(self.pids(kind)) < count for kind, count in KINDS.items()):
            return False
        try:
            answer = await list_workers(self.described["control"], token=self.token)
            if not all(psutil.pid_exists(w.pid) for w in answer.workers):
                return False
            routers = [w.address for w in answer.workers if w.info.role == worker_pb2.WORKER_ROLE_ROUTER]
            served = [model for router in routers for model in await list_models(router, self.token)]
        except CommandError:
            return False
        counts = [(model.num_targets, model.num_drafts) for model in served]
        gateways = [w for w in answer.workers if w.info.role == worker_pb2.WORKER_ROLE_GATEWAY]
        return answer.metadata_available and counts == [(_WORKERS, _WORKERS)] * KINDS["router"] and len(gateways) == 1


_MODULES = {f"outrider.{kind}": kind for kind in ("target", "draft", "gateway")} | {"outrider_controller": "controller"}
_NAMES = {"ray::RouterActor": "router", "ray::ControlPlane": "control", "raylet": "raylet", "gcs_server": "gcs_server"}


def _kind(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        name, argv = process.name(), process.cmdline()
        if name.startswith(("valkey", "redis")):
            return "redis"
        # Ray rewrites the command line of its workers, and their name is cut off.
        for title, kind in _NAMES.items():
            if name == title or argv[:1] == [title]:
                return kind
        if "-m" in argv[:4]:
            return _MODULES.get(argv[argv.index("-m") + 1], "")
    return ""


@asynccontextmanager
async def running_stack(model: str, directory: Path, cache: Path, **more: str) -> AsyncIterator[Up]:
    """As a user starts it, with two of everything there can be two of. `more`: other options. Raises CommandError when
    it does not come up."""
    options = {"target-model": model, "targets": _WORKERS, "drafts": _WORKERS, "routers": _WORKERS}
    options |= {"http-port": 0, "grpc-port": 0, "control-port": 0, "run-dir": directory / "run", "output": "json"}
    if _is_tiny(model):
        worker = f"--dtype float32 --kv-cache-bytes {64 << 20}"
        options |= {"draft-model": model, "target-args": worker, "draft-args": worker}
    options |= {name.replace("_", "-"): value for name, value in more.items()}
    flags = (part for name, value in options.items() for part in (f"--{name}", str(value)))
    directory.mkdir()
    console_log = directory / "console"
    with console_log.open("wb") as console:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "outrider_controller.cli", "up", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=console,
            env={**os.environ, "OUTRIDER_CACHE": str(cache), "OUTRIDER_STATE": str(directory / "state")},
        )
    try:
        yield Up(process, console_log, await _described(process, console_log))
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


def _is_tiny(model: str) -> bool:
    return served_name(model) == _TINY


async def _described(process: asyncio.subprocess.Process, console_log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    text = ""
    while line := (await process.stdout.readline()).decode():
        text += line
        if line == "}\n":
            described: dict[str, Any] = json.loads(text)
            return described
    raise CommandError(f"the stack did not come up:\n{console_log.read_text()}")


async def strike(up: Up, load: Load, blow: Blow, rng: random.Random) -> Outcome:
    """Kills, and watches until all is well again."""
    first_s = time.monotonic()
    before = {kind: up.pids(kind) for kind in blow.kinds}
    killed: list[int] = []
    for kind in blow.kinds:
        if killed:
            await asyncio.sleep(_APART_S)
        there = await _there(up, kind)
        # The second of a kind is the other one, not the first that is being started again.
        victim = rng.choice([pid for pid in there if pid in before[kind]] or there)
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
    last_s = time.monotonic()
    whole_s = await _seconds_until(up.is_whole, _WHOLE_WITHIN_S, last_s)
    await _seconds_until(lambda: _true(_served_s(load, last_s) is not None), _WHOLE_WITHIN_S, last_s)
    await asyncio.sleep(_STEADY_S)
    served_s = _served_s(load, last_s)
    ended = load.between(first_s, time.monotonic())
    return Outcome(
        killed=blow.name,
        served_s=round(served_s if served_s is not None else _WHOLE_WITHIN_S, 1),
        whole_s=round(whole_s, 1),
        requests=len(ended),
        failed=sum(1 for one in ended if one.error),
        longest_s=round(max((one.ended_s - one.started_s for one in ended), default=0.0), 1),
        errors=tuple(sorted({one.error for one in ended if one.error})),
        may_fail=not blow.leaves_one_of_each,
    )


async def _there(up: Up, kind: str) -> list[int]:
    """The second victim may be gone with the first, and come back with it."""
    pids: list[int] = []

    async def found() -> bool:
        pids[:] = up.pids(kind)
        return bool(pids)

    if await _seconds_until(found, _WHOLE_WITHIN_S, time.monotonic()) >= _WHOLE_WITHIN_S:
        raise CommandError(f"no {kind} runs:\n{up.console_log.read_text()[-3000:]}")
    return pids


def _served_s(load: Load, since_s: float) -> float | None:
    answered = [one.ended_s for one in load.ended if one.started_s >= since_s and not one.error]
    return min(answered) - since_s if answered else None


async def _true(value: bool) -> bool:
    return value


async def _seconds_until(condition: Callable[[], Any], limit_s: float, since_s: float) -> float:
    while time.monotonic() - since_s < limit_s:
        if await condition():
            return time.monotonic() - since_s
        await asyncio.sleep(0.2)
    return limit_s


async def run_blows(model: str, blows: Sequence[Blow], streams: int, max_tokens: int, seed: int) -> list[Outcome]:
    """On one stack, one after the other. Raises CommandError when it cannot go on."""
    rng, outcomes = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="kill-pairs-") as scratch:
        cache = Path(scratch) / "cache"
        async with running_stack(model, Path(scratch) / "stack", cache) as up:
            load = Load(up.described["grpc"], up.described["model"], max_tokens)
            async with load.running(streams):
                await _seconds_until(lambda: _true(len(load.ended) >= streams), _WHOLE_WITHIN_S, time.monotonic())
                for blow in blows:
                    outcome = await strike(up, load, blow, rng)
                    outcomes.append(outcome)
                    note(_line(outcome))
            family = psutil.Process(up.process.pid).children(recursive=True)
        if up.process.returncode != ExitCode.OK:
            raise CommandError(f"outrider up ended with {up.process.returncode}:\n{up.console_log.read_text()[-3000:]}")
        _, alive = psutil.wait_procs(family, timeout=10)
        # Nobody may have waited yet for one whose parent is gone.
        alive = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if alive or any((cache / "contexts").iterdir()):
            raise CommandError(f"outrider up left something behind: {alive}")
    return outcomes


@click.command("kill-pairs")
@click.option("--target-model", default=_TINY, metavar="tiny|PATH|NAME", show_default=True, help="Of both targets.")
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True, help="Under way at any time.")
@click.option("--only", multiple=True, metavar="KIND[+KIND]", help="Only this kill or pair; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which one of a kind is hit.")
@max_tokens_option(64)
@json_file_option
def kill_pairs(
    target_model: str, streams: int, only: tuple[str, ...], seed: int, max_tokens: int, json_file: Path | None
) -> int:
    """Kill each process of a stack, and each pair of them one second apart, under load.

    One machine, two targets, drafts and routers. After each kill the stack must answer again within 30 s without a
    hand, and no request may fail where a second of the kind lives.
    """
    blows = [Blow(tuple(one.split("+"))) for one in only] or all_blows()
    if unknown := {kind for blow in blows for kind in blow.kinds} - set(KINDS):
        raise click.UsageError(f"--only: {', '.join(sorted(unknown))}: none of {', '.join(KINDS)}")
    return run_async(_kill_pairs(target_model, blows, streams, max_tokens, seed, json_file))


async def _kill_pairs(
    target_model: str, blows: Sequence[Blow], streams: int, max_tokens: int, seed: int, json_file: Path | None
) -> int:
    with tempfile.TemporaryDirectory(prefix="kill-pairs-") as directory:
        outcomes = await run_blows(_checkpoint(target_model, Path(directory)), blows, streams, max_tokens, seed)
    click.echo(_table(outcomes))
    holds = all(outcome.holds for outcome in outcomes)
    body = {"holds": holds, "outcomes": [{**asdict(one), "holds": one.holds} for one in outcomes]}
    write_json(json_file, "kill-pairs", {**body, "hardware": hardware()})
    return ExitCode.OK if holds else ExitCode.ERROR


def _checkpoint(model: str, directory: Path) -> str:
    if model != _TINY:
        # The stack has a cache of its own.
        return str(located(model) or model)
    from outrider.testing.tiny import tiny_checkpoint

    return str(tiny_checkpoint(directory / _TINY, max_context_len=4096))


_HEADER = ("KILLED", "SERVED AFTER", "WHOLE AFTER", "REQUESTS", "FAILED", "LONGEST", "")


def _row(one: Outcome) -> list[object]:
    failed = f"{one.failed}{' (may)' if one.failed and one.may_fail else ''}"
    verdict = "" if one.holds else "DOES NOT HOLD"
    return [one.killed, f"{one.served_s} s", f"{one.whole_s} s", one.requests, failed, f"{one.longest_s} s", verdict]


def _line(one: Outcome) -> str:
    return "   ".join(map(str, _row(one))) + "".join(f"\n    {error}" for error in one.errors)


def _table(outcomes: Sequence[Outcome]) -> str:
    return columns(_HEADER, [_row(one) for one in outcomes])
