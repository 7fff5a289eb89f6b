"""python -m benchmarks dead-engine"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
from outrider.rpc.v1 import generation_pb2
from outrider_controller.cli.ask.client import Gateway, GatewayAnswer
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan
from outrider_controller.cli.up.stack_options import run_async

from benchmarks import report
from benchmarks.support.asking import make_request
from benchmarks.support.failing_target import FAIL
from benchmarks.support.stacks import ROOT

_MAX_TOKENS, _BEFORE = 256, 8
_MAX_S = 3.0
_PROMPTS = (
    "Describe a town by the sea.",
    "Why is the sky blue?",
    "Tell a story of two dogs.",
    "How are bridges built?",
)


@dataclass(slots=True)
class Streamed:
    """One answer, and when its tokens came."""

    at_s: list[float] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is well under way."""

    def take(self, chunk: generation_pb2.StreamGenerateResponse) -> None:
        if chunk.token_ids:
            self.at_s.append(time.monotonic())
        if len(self.at_s) >= _BEFORE:
            self.enough.set()

    def pause_s(self, failed_s: float) -> float:
        """The longest time without a token after the failure, or around it."""
        times_s = [failed_s, *(at_s for at_s in self.at_s if at_s > failed_s)]
        return max((after - before for before, after in pairwise(times_s)), default=0.0)


@click.command("dead-engine")
@click.option("--streams", type=click.IntRange(1, 64), default=8, show_default=True, help="On two targets.")
@json_file_option
def dead_engine(streams: int, json_file: Path | None) -> int:
    """How soon do requests go on elsewhere when a target's engine fails at every step?

    A stack with two targets and no draft worker. In the middle of some streams the engine of one target begins to raise
    an error in every step, as it does once a CUDA context is broken. The process has to end by itself; its streams have
    to go on at the other target within 3 s, and say what they would have said.
    """
    return run_async(_dead_engine(streams, json_file))


def _amended(plan: StackPlan, ports: Ports) -> StackPlan:
    first, *others = plan.targets
    python, flag, _, *flags = first.argv
    argv = (python, flag, "benchmarks.support.failing_target", *flags)
    changed: ProcessSpec = replace(first, argv=argv, env={**first.env, "PYTHONPATH": str(ROOT)})
    return replace(plan, targets=(changed, *others))


async def _dead_engine(streams: int, json_file: Path | None) -> int:
    before = psutil.cpu_times()
    config = StackConfig(targets=2, drafts=0)
    async with Stack(config, note, _amended) as stack, Gateway(stack.gateway_grpc) as gateway:
        requests = [_request(config.model, number) for number in range(streams)]
        expected = await asyncio.gather(*(gateway.answer(each) for each in requests))
        streamed = [Streamed() for _ in requests]
        running = asyncio.gather(
            *(gateway.answer(each, on_chunk=one.take) for each, one in zip(requests, streamed, strict=True))
        )
        await asyncio.gather(*(one.enough.wait() for one in streamed))
        failing = stack.processes["target-0"]
        failing.stopping = True
        os.kill(failing.pid, FAIL)
        failed_s = time.monotonic()
        await failing.exited()
        ended_s = time.monotonic() - failed_s
        answers = await running
    stolen_s = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(before, "steal", 0.0)
    return _report(expected, answers, [one.pause_s(failed_s) for one in streamed], ended_s, stolen_s, json_file)


def _request(model: str, number: int) -> generation_pb2.GenerateRequest:
    prompt = f"{number}. {_PROMPTS[number % len(_PROMPTS)]}"
    return make_request(model, prompt, "off", max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)


def _report(
    expected: Sequence[GatewayAnswer],
    answers: Sequence[GatewayAnswer],
    pauses_s: Sequence[float],
    ended_s: float,
    stolen_s: float,
    json_file: Path | None,
) -> int:
    moved = [pause_s for answer, pause_s in zip(answers, pauses_s, strict=True) if answer.sums.num_target_failovers]
    same = sum(a.token_ids == b.token_ids for a, b in zip(expected, answers, strict=True))
    body: dict[str, Any] = {
        "streams": len(answers),
        "moved": len(moved),
        "equal texts": same,
        "process ended s": round(ended_s, 2),
        "pause p50 s": round(median(moved), 2) if moved else None,
        "longest s": round(max(moved), 2) if moved else None,
    }
    holds = bool(moved) and max(moved) <= _MAX_S and same == len(answers)
    report.show(report.table([body]), f"CPU time that the host took: {stolen_s:.1f} s; bar {_MAX_S:g} s")
    return report.finish("dead-engine", {"holds": holds, **body, "stolen_s": stolen_s}, json_file)
