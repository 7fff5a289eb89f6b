"""python -m tests.walks: runs a stack, warms it up, and counts the product's files and functions on four walks.

A walk is the time between two calls; what is called in it, in the processes on the way, is counted. What a stack also
calls while nothing is asked of it (leases, probes, metrics) is not, and of an operator's word not what a request calls.
Of a draft only the calls with an argument that is the draft, or holds it, are counted: a step does much beside.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, tenants_pb2
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.output import json_file_option, note, write_json
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from benchmarks.report import show, table
from benchmarks.support.asking import make_request

_PROMPT = "Write the numbers from one to thirty in words, each on a line of its own."
_IDLE_S = 4.0
# Until every process has seen the switch, and has written its log.
_NOTICED_S, _WRITTEN_S = 0.2, 1.0


class Call(NamedTuple):
    """One call of one of the product's functions."""

    at_ns: int
    """By the clock that all processes share."""
    name: str
    """FILE:FUNCTION."""
    process: str
    thread: int
    drafts: tuple[str, ...]
    """Types of the arguments that are or hold a draft."""


_TARGET, _DRAFT = "outrider.target", "outrider.draft"
_OTHERS = "router and control plane"


@dataclass(frozen=True, slots=True)
class Walk:
    """From a call of `first` to the next one of `last`, in the processes on the way."""

    name: str
    first: str
    last: str
    within: tuple[str, ...]


_WALKS = (
    Walk(
        *("draft to verification", "draft/wire.py:_draft", "target/requests/row.py:StepRow.until_end"),
        (_DRAFT, _TARGET),
    ),
    Walk(
        *("acceptance to decision", "target/requests/row.py:StepRow.until_end"),
        *("router/speculation/controller.py:SpeculationController.committed", (_TARGET, _OTHERS)),
    ),
    Walk(
        "set speculation off", ".SetSpeculation", "target/drafts/sequence.py:SequenceDrafts.adjust", (_OTHERS, _TARGET)
    ),
)


@click.command()
@click.option("--files", is_flag=True, help="Name the files of each walk.")
@json_file_option
def walks(files: bool, json_file: Path | None) -> None:
    """Count the product's files and functions on four walks."""
    idle, request, switched = asyncio.run(_recorded())
    background, running = _functions(idle), _functions(request)
    drafts, decisions, word = _WALKS
    ways = [[call for call in part if call.drafts] for part in _parts(request, drafts)]
    found = {
        "request": [running - background],
        drafts.name: [_functions(way) for way in ways],
        decisions.name: [_functions(part) - background for part in _parts(request, decisions)],
        word.name: [_functions(part) - background - running for part in _parts(switched, word)],
    }
    kinds = {kind for way in ways for call in way for kind in call.drafts}
    note(f"types that are or hold a draft: {', '.join(sorted(kinds))}")
    rows = []
    for name, parts in found.items():
        middle = sorted(parts, key=lambda part: len(_files(part)))[len(parts) // 2] if parts else set()
        rows.append({"WALK": name, "FILES": len(_files(middle)), "FUNCTIONS": len(middle), "SEEN": len(parts)})
        if files:
            note(f"{name}:\n  " + "\n  ".join(f"{file}  {' '.join(own)}" for file, own in _files(middle).items()))
    show(table(rows))
    write_json(json_file, "walks", {"walks": rows})
    if unseen := [name for name, parts in found.items() if not parts]:
        raise click.ClickException(f"not seen: {', '.join(unseen)}")


async def _recorded() -> tuple[list[Call], list[Call], list[Call]]:
    """The calls of an idle stack, of a request, and of `set speculation off` while one runs."""
    with tempfile.TemporaryDirectory(prefix="outrider-walks-") as directory:
        here = Path(__file__).parent
        os.environ["OUTRIDER_WALKS"] = directory
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        async with Stack(StackConfig(), note) as stack, Gateway(stack.gateway_grpc) as gateway:
            ask = make_request(stack.config.model, _PROMPT, "on", max_tokens=64, temperature=0.0, ignore_eos=True)
            for _ in range(3):
                await gateway.answer(ask)
            recorder = _Recorder(Path(directory))
            idle = await recorder.during(asyncio.sleep(_IDLE_S))
            request = await recorder.during(gateway.answer(ask))
            # The text repeats itself, so that it is looked up and comes fast: it must not end before the switch.
            ask.options.max_tokens = 6000
            answering = asyncio.create_task(gateway.answer(ask))
            await asyncio.sleep(1)
            switched = await recorder.during(_set_off(stack))
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
    return idle, request, switched


async def _set_off(stack: Stack) -> None:
    async with create_channel(stack.control) as channel:
        off = tenants_pb2.SPECULATION_SETTING_OFF
        request = control_pb2.SetSpeculationRequest(tenant="default", setting=off)
        await control_pb2_grpc.ControlServiceStub(channel).SetSpeculation(request)
    # It holds within a second.
    await asyncio.sleep(1.5)


@dataclass(frozen=True, slots=True)
class _Recorder:
    directory: Path

    async def during(self, work: Awaitable[Any]) -> list[Call]:
        """The calls of all processes while `work` was done, in order."""
        switch = self.directory / "on"
        switch.touch()
        await asyncio.sleep(_NOTICED_S)
        started_ns = time.monotonic_ns()
        await work
        ended_ns = time.monotonic_ns()
        switch.unlink()
        await asyncio.sleep(_WRITTEN_S)
        calls: list[Call] = []
        for file in self.directory.glob("*.json"):
            log = json.loads(file.read_text())
            process = next(iter(log["process"]), "")
            process = process if process.startswith("outrider.") else _OTHERS
            made = [Call(at_ns, name, process, thread, tuple(types)) for at_ns, name, thread, types in log["calls"]]
            calls += [call for call in made if started_ns <= call.at_ns <= ended_ns]
            file.unlink()
        return sorted(calls)


def _parts(calls: Sequence[Call], walk: Walk) -> Iterator[list[Call]]:
    """The walks, from each call of `first` that is followed by `last` before another `first`. In the process where it
    begins, only one thread is on the way."""
    start, calls = None, [call for call in calls if call.process in walk.within]
    for number, call in enumerate(calls):
        if call.name.endswith(walk.first):
            start = number
        elif start is not None and call.name.endswith(walk.last):
            first = calls[start]
            yield [
                one for one in calls[start : number + 1] if one.process != first.process or one.thread == first.thread
            ]
            start = None


def _functions(calls: Sequence[Call]) -> set[str]:
    return {call.name for call in calls}


def _files(functions: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(functions):
        file, _, function = name.partition(":")
        found.setdefault(file, []).append(function)
    return found


if __name__ == "__main__":
    walks()
