"""python -m benchmarks startup"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import httpx
import psutil
from outrider.rpc.v1 import generation_pb2
from outrider_controller.cli.ask.client import Gateway
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.support.asking import make_request

# Redis last: the other processes need it to restart.
_PROCESSES = ("gateway", "controller", "draft-0", "target-0", "redis")
_DRAINED = ("gateway", "target-0")
_TOGETHER = "all together"
_PROMPT, _MAX_TOKENS = "Once upon a time", 64
_ANSWER_TIMEOUT_S = 60.0
_LOOK_S, _LOOK_TIMEOUT_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One start or stop of a process."""

    process: str
    ready_s: float | None = None
    """From start to ready."""
    exit_s: float | None = None
    """From SIGTERM to exit, while idle."""
    drain_s: float | None = None
    """The same, with one stream running."""
    after_stream_s: float | None = None
    """The part of `drain_s` after the client had the stream's end."""
    problem: str = ""


@click.command("startup")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Stacks, one by one.")
@json_file_option
def startup(repeats: int, json_file: Path | None) -> int:
    """How long does each process take to start and to stop?

    A stack on this machine with the default models. Each process in turn gets SIGTERM and starts again, while the
    others run: the gateway and the target with one stream, which has to end whole, then all of them idle. A process
    is ready when its /readyz says so, the controller with its router and control plane, Redis when it answers. The last
    row is the whole stack, whose processes start at the same time, until routers have found all workers. Models and
    compiled kernels lie in the cache already: a machine's first start also compiles kernels, for some seconds.
    """
    return run_async(_startup(repeats, json_file))


async def _startup(repeats: int, json_file: Path | None) -> int:
    turns: list[Turn] = []
    before = psutil.cpu_times()
    for number in range(repeats):
        turns += await _one_stack()
        note(f"{number + 1} of {repeats}")
    stolen_s = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(before, "steal", 0.0)
    problems = [f"{turn.process}: {turn.problem}" for turn in turns if turn.problem]
    report.show(
        report.table([row(name, turns) for name in (*reversed(_PROCESSES), _TOGETHER)]),
        "Seconds: median (least to most). Kernels were compiled already, and models fetched. "
        f"CPU time that the host took: {stolen_s:.1f} s",
        "\n".join(problems),
    )
    body = {"holds": not problems, "problems": problems, "stolen_s": stolen_s}
    return report.finish("startup", {**body, "turns": [asdict(turn) for turn in turns]}, json_file)


async def _one_stack() -> list[Turn]:
    stack = Stack(StackConfig(), note)
    async with AsyncExitStack() as exits:
        started_s = time.monotonic()
        await exits.enter_async_context(stack)
        ready_s = time.monotonic() - started_s
        # Also the warm-up: the first request includes one-time work.
        expected = await _answer(stack)
        turns = [turn for name in _DRAINED for turn in await _drained(stack, name, expected)]
        turns += [turn for name in _PROCESSES for turn in await _restarted(stack, name)]
        started_s = time.monotonic()
    return [*turns, Turn(_TOGETHER, ready_s=ready_s, exit_s=time.monotonic() - started_s)]


async def _restarted(stack: Stack, name: str) -> list[Turn]:
    """Stops and starts an idle process."""
    process = stack.processes[name]
    sent_s, exited_s = await _stopped(process, stack.config.stop_timeout_s)
    return [Turn(name, exit_s=exited_s - sent_s, problem=_problem(process)), await _started(stack, name)]


async def _drained(stack: Stack, name: str, expected: Sequence[int]) -> list[Turn]:
    """Stops a process with SIGTERM at the first token of a stream, and starts it again."""
    process, stops = stack.processes[name], list[asyncio.Task[tuple[float, float]]]()

    def stop(_: generation_pb2.StreamGenerateResponse) -> None:
        if not stops:
            stops.append(asyncio.create_task(_stopped(process, stack.config.stop_timeout_s)))

    try:
        problem = "" if await _answer(stack, stop) == expected else "the stream's answer is another"
    except CommandError as error:
        problem = f"the stream broke off: {error}"
    ended_s = time.monotonic()
    if not stops:
        raise ProcessFailed(f"{name}: {problem}")
    sent_s, exited_s = await stops[0]
    problem = problem or _problem(process)
    turn = Turn(name, drain_s=exited_s - sent_s, after_stream_s=max(0.0, exited_s - ended_s), problem=problem)
    return [turn, await _started(stack, name)]


async def _answer(stack: Stack, on_chunk: Callable[..., None] = lambda chunk: None) -> list[int]:
    request = make_request(
        stack.config.model, _PROMPT, "auto", max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True
    )
    async with Gateway(stack.gateway_grpc) as gateway:
        return (await gateway.answer(request, _ANSWER_TIMEOUT_S, on_chunk)).token_ids


async def _stopped(process: ManagedProcess, grace_s: float) -> tuple[float, float]:
    """Times of SIGTERM and of the exit."""
    process.stopping = True
    sent_s = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.exited(), grace_s)
    return sent_s, time.monotonic()


def _problem(process: ManagedProcess) -> str:
    if process.running:
        return "did not exit in time"
    return f"exit code {process.returncode}" if process.returncode else ""


async def _started(stack: Stack, name: str) -> Turn:
    process = await stack.relaunch(name)
    started_s = time.monotonic()
    try:
        await asyncio.wait_for(_ready(stack, process), stack.config.start_timeout_s)
    except TimeoutError:
        raise ProcessFailed(f"{name} is not ready after {stack.config.start_timeout_s:g} s") from None
    ready_s = time.monotonic() - started_s
    # The next turn must find all other processes ready.
    await stack.assembled()
    return Turn(name, ready_s=ready_s)


async def _ready(stack: Stack, process: ManagedProcess) -> None:
    async with httpx.AsyncClient(timeout=_LOOK_TIMEOUT_S) as http:
        while not await _is_ready(stack, process, http):
            if not process.running:
                raise process.failure()
            await asyncio.sleep(_LOOK_S)


async def _is_ready(stack: Stack, process: ManagedProcess, http: httpx.AsyncClient) -> bool:
    """Ready by its HTTP probe. A gRPC health check could be up to 2 s late, until its channel reconnects."""
    if (answers := process.spec.answers) is not None:
        return await asyncio.to_thread(answers)
    with suppress(httpx.HTTPError):
        pages = [await http.get(f"http://{address}/readyz") for address in ops_of(process.spec.name, stack.ops)]
        return all(page.is_success for page in pages)
    return False


def ops_of(name: str, ops: Mapping[str, str]) -> list[str]:
    """Addresses of the ops ports that a process opens: the controller's are those of its actors."""
    if name != "controller":
        return [ops[name]]
    return [address for actor, address in ops.items() if actor == "control" or actor.startswith("router-")]


def row(name: str, turns: Sequence[Turn]) -> report.Row:
    of_it = [turn for turn in turns if turn.process == name]
    return {
        "process": name,
        "ready": spread([turn.ready_s for turn in of_it]),
        "exit, idle": spread([turn.exit_s for turn in of_it]),
        "exit, one stream": spread([turn.drain_s for turn in of_it]),
        "of that, after its end": spread([turn.after_stream_s for turn in of_it]),
    }


def spread(values: Sequence[float | None]) -> str | None:
    """Median (least to most) of the values that are not None."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else None
    return f"{statistics.median(known):.2f} ({min(known):.2f} to {max(known):.2f})"
