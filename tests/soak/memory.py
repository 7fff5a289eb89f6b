"""python -m tests.soak memory"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.ask.client import Gateway
from outrider_controller.cli.ask.hardware import hardware
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, write_json
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from benchmarks.support.asking import make_request
from benchmarks.support.progress import Progress
from tests.soak.streams import processes_of

_CONTEXT = 1024
_LONGEST_PROMPT, _LONGEST_ANSWER = 700, 60
"""Characters, of which each is a token of the tiny model, and tokens."""
_CANCELLED = 0.2
_TIMEOUT_S = 300.0
_GROWTH = 0.10
"""Of what a process holds after the warm-up: what it may hold more at the end."""
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "seed": 3},
)

Report = Callable[[int, str], None]


@dataclass(slots=True)
class Sample:
    """What each process holds once so many requests have ended."""

    requests: int
    rss: dict[str, int]


@dataclass(slots=True)
class Watched:
    outcomes: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


@click.command("memory")
@click.option("-n", "--num-requests", type=click.IntRange(2), default=10_000, show_default=True)
@click.option("--warm-up", type=click.IntRange(1), default=1_000, show_default=True, help="Requests before it counts.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=16, show_default=True, help="Requests at once.")
@click.option("--target-model", help="A directory or a known model. [default: a tiny one]")
@click.option("--draft-model", help="As above. [default: the tiny one, or the one shipped for the target]")
@click.option("--seed", type=int, default=0, show_default=True)
@json_file_option
def memory(
    num_requests: int,
    warm_up: int,
    concurrency: int,
    target_model: str | None,
    draft_model: str | None,
    seed: int,
    json_file: Path | None,
) -> int:
    """Thousands of requests of mixed lengths: does any process hold more and more memory?

    A whole stack with two targets. Prompts and answers of all lengths, greedy and sampled, one in five left by its
    client. At the end no process may hold over 10 % more than after the warm-up.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as scratch:
        tiny = "" if target_model else str(tiny_checkpoint(Path(scratch) / "tiny", max_context_len=_CONTEXT))
        config = StackConfig(
            target_model=target_model or tiny,
            draft_model=draft_model or tiny,
            targets=2,
            run_dir=Path(scratch) / "run",
        )
        report = Progress("requests", num_requests)
        watched = asyncio.run(watch(config, num_requests, concurrency, seed, report))
    found = problems(watched, warm_up)
    click.echo(_table(watched, warm_up))
    for problem in found:
        click.echo(problem)
    body = {"holds": not found, "problems": found, "requests": num_requests, "warm_up": warm_up}
    more = {"concurrency": concurrency, "outcomes": dict(watched.outcomes), "seconds": watched.seconds}
    samples = [asdict(sample) for sample in watched.samples]
    write_json(json_file, "bench-memory", {**body, **more, "samples": samples, "hardware": hardware()})
    return ExitCode.ERROR if found else ExitCode.OK


async def watch(config: StackConfig, num_requests: int, concurrency: int, seed: int, report: Report) -> Watched:
    """Starts the stack, asks, and looks at every process a hundred times on the way."""
    watched, rng = Watched(), random.Random(seed)
    every = max(1, num_requests // 100)
    numbers = iter(range(num_requests))
    async with Stack(config) as stack, Gateway(stack.gateway_grpc) as gateway:
        pids = await processes_of(stack)
        started_s = time.monotonic()

        async def client() -> None:
            for _ in numbers:
                watched.outcomes[await _ask(gateway, config.model, rng)] += 1
                ended = watched.outcomes.total()
                report(ended, "")
                if ended % every == 0:
                    rss = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
                    watched.samples.append(Sample(ended, rss))

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        watched.seconds = round(time.monotonic() - started_s, 1)
    return watched


async def _ask(gateway: Gateway, model: str, rng: random.Random) -> str:
    """How it ended: complete, cancelled, or an error."""
    # Evenly by order of magnitude: many short ones, and all lengths.
    prompt = "".join(rng.choices("abcdefgh ", k=round(math.exp(rng.uniform(0, math.log(_LONGEST_PROMPT))))))
    length = rng.randint(1, _LONGEST_ANSWER)
    request = make_request(model, prompt, "auto", max_tokens=length, ignore_eos=True, **rng.choice(_SAMPLINGS))
    wanted = rng.randrange(length) if rng.random() < _CANCELLED else length
    received = 0
    try:
        async with aclosing(gateway.stream(request, _TIMEOUT_S)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                received += len(chunk.token_ids)
                if received >= wanted and wanted < length:
                    return "cancelled"
    except CommandError as error:
        return str(error)
    return "complete" if received == length else f"{received} of {length} tokens"


def problems(watched: Watched, warm_up: int) -> list[str]:
    """What must not be: failed requests, and processes that hold more than after the warm-up."""
    found = [f"{count} x {how}" for how, count in watched.outcomes.items() if how not in ("complete", "cancelled")]
    first, last = _ends(watched, warm_up)
    for name, held in last.rss.items():
        if held > first.rss[name] * (1 + _GROWTH):
            grown = held / first.rss[name] - 1
            found.append(f"{name}: {grown:.0%} more after {last.requests} requests than after {first.requests}")
    return found


def _ends(watched: Watched, warm_up: int) -> tuple[Sample, Sample]:
    return next(s for s in watched.samples if s.requests >= warm_up), watched.samples[-1]


def _table(watched: Watched, warm_up: int) -> str:
    first, last = _ends(watched, warm_up)
    rows = []
    for name in last.rss:
        held = [sample.rss[name] for sample in (watched.samples[0], first, last)]
        most = max(sample.rss[name] for sample in watched.samples)
        rows.append([name, *(f"{size / 1e6:.0f}" for size in (*held, most)), f"{held[2] / held[1] - 1:+.1%}"])
    header = ["PROCESS, MB", *(f"AFTER {s.requests}" for s in (watched.samples[0], first, last)), "MOST", "GROWN"]
    return columns(header, rows)
