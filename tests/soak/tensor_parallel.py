"""python -m tests.soak tensor-parallel"""

from __future__ import annotations

import asyncio
import itertools
import signal
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from outrider.model_names import served_name
from outrider.rpc.v1 import generation_pb2 as generation
from outrider_controller.cli.ask.client import Gateway, GatewayAnswer
from outrider_controller.cli.ask.hardware import hardware
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json
from outrider_controller.cli.up.models import DEFAULT_TARGET
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig
from outrider_controller.cli.up.stack_options import run_async
from outrider_controller.cli.up.supervisor import Supervisor

from benchmarks.support.asking import answers, make_request, max_tokens_option
from benchmarks.support.prompts import Prompt
from tests.vllm.processes import ranks

_TINY = "tiny"
_SIZES = {_TINY: 2, DEFAULT_TARGET: 3}
_QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "Write a haiku about the sea.",
    "What is 17 times 23?",
    "How do bees make honey?",
    "Translate into French: good morning.",
    "List the planets, nearest first.",
    "What does a compiler do?",
)
# Way of asking → options, and whether with speculation. All are compared with plain decoding on one process.
_WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({"temperature": 0.0}, "off"),
    "greedy, speculation": ({"temperature": 0.0}, "on"),
    "coupled": ({"temperature": 0.8, "top_p": 0.95, "seed": lambda number: 100 + number}, "off"),
}
_FAULTS = ((1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP))
"""What happens to which process of the model. One that is stopped hangs until the target's watchdog ends it."""
_AFTER_TOKENS = 8
_KV_BYTES, _STEP_TIMEOUT_S = 200_000_000, 20
# The process starts again, and vLLM loads the model.
_MAX_S = 120.0
_GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """One rank that was sent a signal while it served a stream."""

    rank: int
    planted: str
    seconds: float
    """From the signal to the next token."""
    error: str
    """What the client of that stream was told; empty: nothing."""
    equal: bool
    """Whether its text is that of an undisturbed answer."""

    @property
    def holds(self) -> bool:
        return self.seconds <= _MAX_S and (self.equal or bool(self.error))


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    size: int
    equal: dict[str, int]
    """By way of asking, of len(_QUESTIONS) each."""
    recoveries: tuple[Recovery, ...]

    @property
    def holds(self) -> bool:
        return all(n == len(_QUESTIONS) for n in self.equal.values()) and all(r.holds for r in self.recoveries)


@click.command("tensor-parallel")
@click.option(
    "--model", default="", metavar="PATH|NAME", help=f"Default: both {_TINY} (random weights) and the default."
)
@click.option("--size", type=click.IntRange(2, 64), default=None, help="Processes; default: 2 for tiny, else 3.")
@click.option("--vllm-python", default="build/vllm/bin/python", show_default=True, help="Of the environment with vLLM.")
@max_tokens_option(32)
@json_file_option
def tensor_parallel(model: str, size: int | None, vllm_python: str, max_tokens: int, json_file: Path | None) -> int:
    """One target on several processes of vLLM: are the texts equal, and how soon is it back?

    Float32. Texts are compared with plain decoding on one process: greedy, greedy with speculation (lookups), and
    sampled with a seed. Then a process of the model is ended by SIGKILL in mid-stream, twice, and one hangs by
    SIGSTOP: what counts is the time until the next token, at most two minutes, and the text.
    """
    cases = {model: size or _SIZES.get(model, 3)} if model else {name: size or _SIZES[name] for name in _SIZES}
    return run_async(_run(cases, vllm_python, max_tokens, json_file))


async def _run(cases: dict[str, int], vllm_python: str, max_tokens: int, json_file: Path | None) -> int:
    results = []
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        for model, size in cases.items():
            path = await asyncio.to_thread(_tiny, Path(directory) / _TINY) if model == _TINY else model
            config = StackConfig(
                target_model=path,
                engine="vllm",
                vllm_python=vllm_python,
                tensor_parallel=size,
                target_args=f"--dtype float32 --kv-cache-bytes {_KV_BYTES} --step-timeout {_STEP_TIMEOUT_S}",
                drafts=0,
            )
            results.append(await _measure(config, max_tokens))
    click.echo(f"{_equality_table(results)}\n\n{_recovery_table(results)}")
    holds = all(result.holds for result in results)
    rows = [{**asdict(result), "holds": result.holds, "of": len(_QUESTIONS)} for result in results]
    write_json(
        json_file,
        "bench-tensor-parallel",
        {"holds": holds, "max_tokens": max_tokens, "results": rows, "hardware": hardware()},
    )
    return ExitCode.OK if holds else ExitCode.ERROR


def _tiny(directory: Path) -> str:
    from outrider.testing.tiny import tiny_checkpoint

    # vLLM's attention for CPUs wants heads of this size.
    return str(tiny_checkpoint(directory, head_dim=32))


async def _measure(config: StackConfig, max_tokens: int) -> Result:
    name = served_name(config.target_model)
    note(f"{name} on one process")
    async with Stack(replace(config, tensor_parallel=1), note) as stack:
        plain = {way: await _ask(stack, way, options, "off", max_tokens) for way, (options, _) in _WAYS.items()}
    note(f"{name} on {config.tensor_parallel}")
    async with Stack(config, note) as stack:
        equal = {}
        for way, (options, speculation) in _WAYS.items():
            found = await _ask(stack, way, options, speculation, max_tokens)
            equal[way] = sum(_same(a, b) for a, b in zip(plain[way], found, strict=True))
        supervisor = Supervisor(stack.processes, stack.relaunch, note, config.start_timeout_s)
        supervision = asyncio.create_task(supervisor.run())
        recoveries = tuple([await _recovery(stack, *fault) for fault in _FAULTS])
        supervision.cancel()
    return Result(name, config.tensor_parallel, equal, recoveries)


async def _ask(
    stack: Stack, way: str, options: dict[str, Any], speculation: str, max_tokens: int
) -> list[GatewayAnswer]:
    prompts = [Prompt(str(number), "all", text) for number, text in enumerate(_QUESTIONS)]
    return await answers(
        stack.gateway_grpc,
        stack.config.model,
        prompts,
        way,
        speculation=speculation,
        concurrency=4,
        max_tokens=max_tokens,
        ignore_eos=True,
        **options,
    )


def _same(one: GatewayAnswer, other: GatewayAnswer) -> bool:
    return one.text == other.text and one.token_ids == other.token_ids


async def _recovery(stack: Stack, rank: int, planted: signal.Signals) -> Recovery:
    request = make_request(
        stack.config.model, _QUESTIONS[0], "off", max_tokens=16 * _AFTER_TOKENS, ignore_eos=True, temperature=0.0
    )
    async with Gateway(stack.gateway_grpc) as gateway:
        plain = await gateway.answer(request)
        note(f"rank {rank} gets {planted.name}")
        times: list[float] = []
        struck_s = 0.0

        def arrived(chunk: generation.StreamGenerateResponse) -> None:
            nonlocal struck_s
            times.extend([time.monotonic()] * len(chunk.token_ids))
            if len(times) >= _AFTER_TOKENS and not struck_s:
                struck_s = time.monotonic()
                _strike(stack, rank, planted)

        answer, error = GatewayAnswer(), ""
        try:
            answer = await gateway.answer(request, on_chunk=arrived)
        except CommandError as failure:
            error = str(failure)
            times.append(await _until_answered(gateway, request))
    await stack.assembled()
    after = [struck_s, *(at for at in times if at > struck_s)]
    # What was on its way then still arrives: it is back at the end of the longest pause.
    _, back_s = max((later - at, later) for at, later in itertools.pairwise(after))
    return Recovery(rank, planted.name, round(back_s - struck_s, 2), error, _same(plain, answer))


def _strike(stack: Stack, rank: int, planted: signal.Signals) -> None:
    every = ranks(stack.processes["target-0"].pid, stack.config.tensor_parallel)
    sorted(every, key=lambda one: int(one.pid))[rank].send_signal(planted)


async def _until_answered(gateway: Gateway, request: generation.GenerateRequest) -> float:
    """Asks anew until there is a first token; its monotonic time. Raises CommandError after a minute."""
    give_up_s = time.monotonic() + _GIVE_UP_S
    while True:
        asked_s = time.monotonic()
        try:
            return asked_s + (await gateway.answer(request, _GIVE_UP_S)).first_token_s
        except CommandError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.1)


def _equality_table(results: list[Result]) -> str:
    rows = [
        [result.model, result.size, way, f"{count} of {len(_QUESTIONS)}"]
        for result in results
        for way, count in result.equal.items()
    ]
    return columns(["MODEL", "PROCESSES", "MODE", "TEXTS EQUAL TO ONE PROCESS"], rows)


def _recovery_table(results: list[Result]) -> str:
    rows = [
        [
            result.model,
            result.size,
            f"{recovery.planted} to rank {recovery.rank}",
            f"{recovery.seconds:.2f}",
            recovery.error or "no error",
            "equal" if recovery.equal else "cut off" if recovery.error else "DIFFERENT",
        ]
        for result in results
        for recovery in result.recoveries
    ]
    return columns(["MODEL", "PROCESSES", "SIGNAL", "SERVED AGAIN AFTER S", "CLIENT SAW", "TEXT"], rows)
