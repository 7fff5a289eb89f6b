"""python -m tests.soak faults"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from outrider.hardware import hardware
from outrider.rpc.v1 import generation_pb2 as generation
from outrider_controller.cli.client import SPECULATION_MODES, Gateway, GatewayAnswer
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async
from outrider_controller.control.api.rows import worker_rows

from benchmarks.support.asking import make_request, max_tokens_option

_PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle."
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}
_KILL_AFTER_TOKENS = 24
_STOPPED_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]
_SEEN_RUNNING_TIMEOUT_S = 5.0


Blow = Callable[[Stack, str], None]
"""What happens to the process of this name."""


def killed(stack: Stack, name: str) -> None:
    stack.processes[name].stopping = True
    stack.processes[name].kill()


def stopped(stack: Stack, name: str) -> None:
    """By SIGSTOP, for 10 s: its connections stay open, and nothing answers."""
    pid = stack.processes[name].pid
    os.kill(pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(_STOPPED_S, _resume, pid)


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def hangs(file: Path, stack: Stack, name: str) -> None:
    """Of a stack that is `able_to_hang` by this file: a step of a target does not return."""
    file.touch()


def able_to_hang(file: Path, plan: StackPlan, ports: Ports) -> StackPlan:
    """Targets hang once `file` is there, and may for a second."""

    def changed(spec: ProcessSpec) -> ProcessSpec:
        python, flag, _, *flags = spec.argv
        argv = (python, flag, "tests.soak.hanging_target", str(file), *flags, "--step-timeout", "1")
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
        return replace(spec, argv=argv, env={**spec.env, "PYTHONPATH": path})

    return replace(plan, targets=tuple(map(changed, plan.targets)))


@dataclass(frozen=True, slots=True)
class Outcome:
    blow: str
    killed: str
    mode: str
    error: str
    """What the client was told; empty: nothing."""
    equal: bool
    tokens: int
    tokens_after: int
    """Received after the kill."""
    pause_ms: float
    """Longest time between two messages from the kill on."""
    failovers: int

    @property
    def holds(self) -> bool:
        return not self.error and self.equal and self.tokens_after > 0


@click.command("faults")
@max_tokens_option(192)
@json_file_option
def faults(max_tokens: int, json_file: Path | None) -> int:
    """Kill workers in mid-stream: does the client notice?

    Two targets, one draft, float32. After the 24th token the draft or target that serves the stream is ended by
    SIGKILL; or the target is stopped by SIGSTOP for 10 s; or a step of the target does not return, where one may take
    1 s. All of it greedy and sampled with a seed. The text must be the one of an undisturbed answer, and the client
    must see no error.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run_async(_faults(max_tokens, json_file, Path(folder) / "hang"))


async def _faults(max_tokens: int, json_file: Path | None, file: Path) -> int:
    outcomes = []
    config = StackConfig(targets=2, target_args="--dtype float32", pin=True)
    blows: dict[str, tuple[str, Blow]] = {
        "SIGKILL, draft": ("draft", killed),
        "SIGKILL, target": ("target", killed),
        "SIGSTOP, target": ("target", stopped),
        "hanging step, target": ("target", partial(hangs, file)),
    }
    stack = Stack(config, note, partial(able_to_hang, file))
    async with stack, Gateway(stack.gateway_grpc) as gateway:
        for mode, options in MODES.items():
            request = make_request(config.model, _PROMPT, "off", max_tokens=max_tokens, ignore_eos=True, **options)
            plain = await gateway.answer(request)
            request.options.speculation = SPECULATION_MODES["on"]
            for name, (role, blow) in blows.items():
                note(f"{mode}: {name}")
                outcomes.append(await disturbed(stack, gateway, request, role, mode, plain, name, blow))
    click.echo(_table(outcomes))
    holds = all(outcome.holds for outcome in outcomes)
    write_json(json_file, "bench-faults", {"holds": holds, "outcomes": _rows(outcomes), "hardware": hardware()})
    return ExitCode.OK if holds else ExitCode.ERROR


async def disturbed(
    stack: Stack,
    gateway: Gateway,
    request: generation.GenerateRequest,
    role: str,
    mode: str,
    plain: GatewayAnswer,
    name_of_blow: str = "SIGKILL",
    blow: Blow = killed,
) -> Outcome:
    """One answer during which a worker of `role` that serves it is struck; afterwards that worker is started again."""
    await _idle(stack)
    times: list[tuple[float, int]] = []
    enough = asyncio.Event()

    def arrived(chunk: generation.StreamGenerateResponse) -> None:
        times.append((time.monotonic(), len(chunk.token_ids)))
        if sum(count for _, count in times) >= _KILL_AFTER_TOKENS:
            enough.set()

    asking = asyncio.ensure_future(gateway.answer(request, on_chunk=arrived))
    waiting = asyncio.ensure_future(enough.wait())
    await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    name = await _serving(stack, role)
    killed_s = time.monotonic()
    blow(stack, name)
    answer, error = GatewayAnswer(), ""
    try:
        answer = await asking
    except CommandError as failure:
        error = str(failure)
    await stack.restart(name)
    await stack.assembled()
    after = [(at, count) for at, count in times if at > killed_s]
    gaps = [b - a for a, b in zip([killed_s, *(at for at, _ in after)], [at for at, _ in after], strict=False)]
    sums = answer.sums
    return Outcome(
        blow=name_of_blow,
        killed=role,
        mode=mode,
        error=error,
        equal=answer.text == plain.text and answer.token_ids == plain.token_ids,
        tokens=len(answer.token_ids),
        tokens_after=sum(count for _, count in after),
        pause_ms=round(max(gaps, default=0.0) * 1e3, 1),
        failovers=sums.num_target_failovers if role == "target" else sums.num_draft_failovers,
    )


async def _idle(stack: Stack) -> None:
    """No lease tells any more of a request that is over: the next one may be served by another worker."""
    deadline_s = time.monotonic() + _SEEN_RUNNING_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if not any(row["running"] for row in worker_rows(await stack.workers())):
            return
        await asyncio.sleep(0.05)
    raise CommandError("the request before is over, and a lease still tells of it")


async def _serving(stack: Stack, role: str) -> str:
    """Name of the process of `role` that serves the one request there is: told by the load on its lease."""
    deadline_s = time.monotonic() + _SEEN_RUNNING_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for row in worker_rows(await stack.workers()):
            if row["role"] == role and row["running"]:
                for process in stack.processes.values():
                    if process.spec.address == row["address"]:
                        return process.spec.name
        await asyncio.sleep(0.05)
    raise CommandError(f"no {role} said that it serves the request; answers may be too short: --max-tokens")


def _rows(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    names = ("blow", "killed", "mode", "error", "equal", "tokens", "tokens_after", "pause_ms", "failovers", "holds")
    return [{name: getattr(outcome, name) for name in names} for outcome in outcomes]


def _table(outcomes: list[Outcome]) -> str:
    header = ["BLOW", "MODE", "CLIENT SAW", "TEXT", "TOKENS", "AFTER IT", "PAUSE MS", "FAILOVERS"]
    rows = [
        [
            o.blow,
            o.mode,
            o.error or "no error",
            "equal" if o.equal else "DIFFERENT",
            o.tokens,
            o.tokens_after,
            f"{o.pause_ms:.0f}",
            o.failovers,
        ]
        for o in outcomes
    ]
    return columns(header, rows)
