"""python -m benchmarks kernels"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
import psutil
from outrider.engine_config import QUANTIZATIONS
from outrider_controller.cli.models import DEFAULT_TARGET, default_draft
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table
from benchmarks.support.progress import Progress

if TYPE_CHECKING:
    from outrider.engine import Engine, EngineSequence

_CONTEXT, _VERIFIED, _CHUNK, _BLOCK = 128, 5, 512, 16
_MAX_OF_READING, _MAX_OF_A_STEP = 1.7, 1.15

_QUANTIZED = {"quantized decode": 1, "quantized verify": _VERIFIED}

Measure = Callable[[], object]


@dataclass(slots=True)
class Times:
    """Milliseconds of one variant, a list per measure."""

    variant: str
    measures: dict[str, Measure]
    ms: dict[str, list[float]] = field(default_factory=dict)

    def least(self, name: str) -> float:
        return min(self.ms[name])


@click.command("kernels")
@click.option("--model", default=DEFAULT_TARGET, show_default=True, metavar="PATH|NAME")
@click.option("--draft-model", default="", metavar="PATH|NAME", help="Default: the one shipped for the model.")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Default: every one that this CPU can run.")
@click.option("--quantization", type=click.Choice(QUANTIZATIONS[1:]), help="Also steps of the model in this, in turns.")
@click.option("--rounds", type=click.IntRange(3), default=15, show_default=True, help="Turns of each short measure.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of a step.")
@json_file_option
def kernels(
    model: str,
    draft_model: str,
    variants: tuple[str, ...],
    quantization: str | None,
    rounds: int,
    prompt_tokens: int,
    threads: int,
    json_file: Path | None,
) -> int:
    """What do a step, its verification and a prompt cost in each variant of the CPU kernels?

    Variants take turns, and beside each step as many bytes are read as the model's weights have: a step that takes
    no longer than that is as good as it gets. Ratios are of the turns' minima.
    """
    import torch
    from outrider.engine import resolve
    from outrider.engine.backends.cpu import runnable_variants

    torch.set_num_threads(threads)
    path, draft = resolve(model), resolve(draft_model or default_draft(model))
    weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    buffer = torch.ones(weight_bytes // 8, dtype=torch.int64)
    reading = Times("reading", {"read": buffer.sum})
    chosen = [_times(name, path, draft, prompt_tokens, quantization) for name in variants or runnable_variants()]
    stolen, began = psutil.cpu_times().steal, time.monotonic()
    step = Progress("rounds", rounds)
    for number in range(rounds):
        _take_turns([reading, *chosen], number, long=number % 5 == 0)
        step(number + 1, "")
    stolen_share = (psutil.cpu_times().steal - stolen) / (time.monotonic() - began) / (psutil.cpu_count() or 1)
    rows = [_row(times, reading.least("read"), prompt_tokens) for times in chosen]
    gigabytes = weight_bytes / 1e6 / reading.least("read")
    about = f"{weight_bytes / 1e6:.0f} MB are read in {reading.least('read'):.1f} ms at least ({gigabytes:.1f} GB/s);"
    show(table(rows), f"{about} {threads} threads; the host took {stolen_share:.1%} of the time.")
    holds = all(row["holds"] for row in rows)
    samples = {times.variant: times.ms for times in [reading, *chosen]}
    body = {"holds": holds, "rows": rows, "ms": samples, "weight_bytes": weight_bytes, "stolen": stolen_share}
    return finish("kernels", body, json_file)


def _times(variant: str, path: Path, draft: Path, prompt_tokens: int, quantization: str | None) -> Times:
    from outrider.engine import EngineConfig
    from outrider.engine.loading.loader import load_engine

    num_blocks = 64 + prompt_tokens // _BLOCK
    config = EngineConfig(execution="native", native_variant=variant, num_blocks=num_blocks, prefix_cache=False)
    target, small = load_engine(path, config), load_engine(draft, config)
    prompt = [3 + 7 * i % 4000 for i in range(prompt_tokens)]
    measures: dict[str, Measure] = {"decode": _step_of(target, 1), "verify": _step_of(target, _VERIFIED)}
    if quantization:
        fewer_bits = load_engine(path, replace(config, quantization=quantization))
        measures |= {name: _step_of(fewer_bits, tokens) for name, tokens in _QUANTIZED.items()}
    measures |= {"draft": _step_of(small, 1), "prompt": lambda: _read_prompt(target, prompt)}
    return Times(variant, measures)


def _step_of(engine: Engine, tokens: int) -> Measure:
    """A measure that repeats a step of `tokens` tokens after a context."""
    from outrider.engine import Row

    sequence = engine.kv.open([])
    _run(engine, sequence, [3 + 5 * i for i in range(_CONTEXT)])

    def step() -> None:
        engine.forward([Row(sequence, [9] * tokens, tokens)]).argmax(-1).tolist()
        engine.kv.rewind(sequence, _CONTEXT)

    return step


def _read_prompt(engine: Engine, prompt: list[int]) -> None:
    sequence = engine.kv.open([])
    _run(engine, sequence, prompt)
    engine.kv.close(sequence)


def _run(engine: Engine, sequence: EngineSequence, tokens: list[int]) -> None:
    from outrider.engine import Row

    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        engine.forward([Row(sequence, part, 1)])


def _take_turns(all_times: Sequence[Times], number: int, *, long: bool) -> None:
    for times in all_times if number % 2 == 0 else all_times[::-1]:
        for name, measure in times.measures.items():
            if name != "prompt" or long:
                if name != "prompt":
                    measure()
                began = time.perf_counter()
                measure()
                times.ms.setdefault(name, []).append(1000 * (time.perf_counter() - began))


def _row(times: Times, read_ms: float, prompt_tokens: int) -> dict[str, object]:
    decode, verify = times.least("decode"), times.least("verify")
    holds = decode <= _MAX_OF_READING * read_ms and verify <= _MAX_OF_A_STEP * decode
    quantized = {f"{name} ms": round(times.least(name), 2) for name in _QUANTIZED if name in times.ms}
    plain = {"quantized decode": decode, "quantized verify": verify}
    ratios = {f"{name} / plain": round(times.least(name) / plain[name], 3) for name in _QUANTIZED if name in times.ms}
    return {
        "variant": times.variant,
        "step ms": round(decode, 2),
        "median": round(median(times.ms["decode"]), 2),
        "step / reading": round(decode / read_ms, 2),
        f"verify {_VERIFIED} ms": round(verify, 2),
        "verify / step": round(verify / decode, 2),
        **quantized,
        **ratios,
        "draft step ms": round(times.least("draft"), 2),
        f"prompt of {prompt_tokens} ms": round(times.least("prompt")),
        "holds": holds,
    }
