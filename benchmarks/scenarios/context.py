"""python -m benchmarks context"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
from outrider.engine_config import DTYPES
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option, note
from outrider_controller.cli.up.models import DEFAULT_TARGET

from benchmarks.report import Row, finish, show, table
from benchmarks.support.lines import Line, least_squares
from benchmarks.support.progress import Progress

if TYPE_CHECKING:
    from outrider.engine import Engine, EngineSequence

_CHUNK = 512
# Share of the step times' variance that the line must explain.
_LINEAR = 0.98


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one token at one context."""

    context: int
    """Tokens that the step attends to, including its own."""
    kv_bytes: int
    """Bytes of keys and values that it reads."""
    best_ms: float
    typical_ms: float


@click.command("context")
@click.option("--model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(2),
    multiple=True,
    default=(128, 256, 512, 1024, 2048, 4096),
    show_default=True,
    metavar="TOKENS",
    help="May be given several times.",
)
@click.option("--rounds", type=click.IntRange(3), default=15, show_default=True, help="Steps of each context.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of a step.")
@json_file_option
def context(
    model: str, dtype: str, contexts: tuple[int, ...], rounds: int, threads: int, json_file: Path | None
) -> int:
    """What does a token cost as the context grows?

    Plain decode steps of the engine, one sequence, contexts in turns; a straight line through the best times over the
    bytes of keys and values that a step reads. The cost is linear if the line explains 98 % of the variance.
    """
    if len(set(contexts)) < 3:
        raise click.UsageError("--context: a line through fewer than three contexts shows nothing")
    engine = _load(model, dtype, max(contexts), threads)
    costs = _measure(engine, sorted(set(contexts)), rounds)
    line = fitted(costs)
    holds = line.r_squared >= _LINEAR
    show(table([_row(cost, line) for cost in costs]), _describe(line))
    body = {"holds": holds, "line_ms_over_kv_bytes": asdict(line), "costs": [asdict(cost) for cost in costs]}
    about = {"model": model, "dtype": dtype, "threads": threads, "rounds": rounds}
    return finish("context", {**body, **about}, json_file)


def _load(model: str, dtype: str, longest: int, threads: int) -> Engine:
    import torch
    from outrider.engine import CheckpointError, EngineConfig, resolve
    from outrider.engine.models.loader import load_engine

    torch.set_num_threads(threads)
    config = EngineConfig(dtype=dtype)
    try:
        engine = load_engine(resolve(model, note), config)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    most = min(engine.info.max_context_len, engine.info.block_size * engine.info.num_blocks)
    if longest > most:
        raise CommandError(f"--context: {longest} tokens, at most {most} fit")
    return engine


def _measure(engine: Engine, contexts: Sequence[int], rounds: int) -> list[Cost]:
    """Measures the contexts in turns, so that a slow minute hits all equally."""
    draw = random.Random(0)
    prompt = [draw.randrange(3, engine.info.vocab_size) for _ in range(contexts[-1])]
    sequences = _opened(engine, prompt, contexts)
    seconds: list[list[float]] = [[] for _ in contexts]
    report = Progress("rounds", rounds + 1)
    for number in range(rounds + 1):
        for taken, sequence in zip(seconds, sequences, strict=True):
            taken.append(_step_s(engine, sequence, prompt))
        report(number + 1, "")
    # Without the first round, which includes one-time work for each shape.
    return [
        Cost(
            count, count * engine.kv_bytes_per_token, round(min(taken[1:]) * 1e3, 3), round(median(taken[1:]) * 1e3, 3)
        )
        for count, taken in zip(contexts, seconds, strict=True)
    ]


def _opened(engine: Engine, prompt: Sequence[int], contexts: Sequence[int]) -> list[EngineSequence]:
    """One sequence per context, without its last token. All share the blocks of the longest."""
    from outrider.engine import Row

    sequences = []
    # The longest first, so that the others find their prefixes in the cache.
    for count in reversed(contexts):
        sequence = engine.kv.open(prompt[:count])
        while sequence.cached_len < count - 1:
            start = sequence.cached_len
            engine.forward([Row(sequence, prompt[start : min(start + _CHUNK, count - 1)], 0)])
        engine.kv.publish(sequence, count - 1)
        sequences.append(sequence)
    return sequences[::-1]


def _step_s(engine: Engine, sequence: EngineSequence, prompt: Sequence[int]) -> float:
    """Time of a step of one token, which is then rewound."""
    from outrider.engine import Row

    length = sequence.cached_len
    started_s = time.perf_counter()
    engine.forward([Row(sequence, prompt[length : length + 1], 1)]).argmax(-1).tolist()
    taken_s = time.perf_counter() - started_s
    engine.kv.rewind(sequence, length)
    return taken_s


def fitted(costs: Sequence[Cost]) -> Line:
    """Line of milliseconds over bytes of keys and values."""
    return least_squares([cost.kv_bytes for cost in costs], [cost.best_ms for cost in costs])


def _row(cost: Cost, line: Line) -> Row:
    return {
        "CONTEXT": cost.context,
        "KV READ MB": f"{cost.kv_bytes / 1e6:.1f}",
        "STEP MS (MINIMUM)": f"{cost.best_ms:.2f}",
        "MEDIAN": f"{cost.typical_ms:.2f}",
        "ON THE LINE": f"{line.at(cost.kv_bytes):.2f}",
    }


def _describe(line: Line) -> str:
    rate = f"{1 / line.slope / 1e6:.1f} GB/s" if line.slope > 0 else "-"
    described = f"{line.intercept:.2f} ms + {line.slope * 1e6:.4f} ms per MB of KV ({rate}), R² {line.r_squared:.4f}"
    return f"{described}: {'linear' if line.r_squared >= _LINEAR else 'NOT LINEAR'}"
