"""python -m benchmarks distilling"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import click
from outrider_controller.cli.output import json_file_option
from outrider_controller.cli.up.models import DEFAULT_TARGET

from benchmarks.report import finish, show, table

_BAR = 400
_AVX2 = frozenset({"avx2", "fma"})


class _Measured(Exception):
    """Both stages have run."""


@click.command("distilling")
@click.option("--avx2", is_flag=True, help="As on a CPU that has no more than AVX2.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--corpus-tokens", type=click.IntRange(5000), default=12_000, show_default=True)
@click.option("--train-tokens", type=click.IntRange(5000), default=9000, show_default=True)
@json_file_option
def distilling(avx2: bool, threads: int, corpus_tokens: int, train_tokens: int, json_file: Path | None) -> int:
    """How many tokens does `outrider distill` write and learn a second?

    In seconds of processor time, so with several threads for each of them. Also: the hours of the default.
    """
    if avx2:
        # Read when torch is loaded, which the next imports do.
        os.environ.update(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    from outrider.engine.backends.cpu import variants
    from outrider.training import CorpusConfig, DistillConfig, LoopConfig, run

    if avx2:
        variants.cpu_features = cache(lambda: _AVX2)
    # Stage → (tokens, processor time) at its first and last report.
    seen: dict[str, list[tuple[int, float]]] = {"corpus": [], "train": []}

    def progress(stage: str, done: int, total: int, note: str) -> None:
        if stage not in seen:
            raise _Measured
        seen[stage].append((done, time.process_time()))

    with tempfile.TemporaryDirectory() as root:
        config = DistillConfig(
            Path(root, "draft"),
            Path(root, "work"),
            DEFAULT_TARGET,
            corpus=CorpusConfig(tokens=corpus_tokens),
            training=LoopConfig(train_tokens=train_tokens, batch_tokens=2048),
            threads=threads,
        )
        with suppress(_Measured):
            run(config, progress)
    rates = {stage: _rate(*points[:1], *points[-1:]) for stage, points in seen.items()}
    default = CorpusConfig().tokens / rates["corpus"] + LoopConfig().train_tokens / rates["train"]
    rows = [{"STAGE": stage, "TOKENS/S OF A CORE": f"{rate:.0f}"} for stage, rate in rates.items()]
    show(table(rows), f"the default takes one core {default / 3600:.1f} hours; at least {_BAR} tokens learned a second")
    body = {"holds": rates["train"] >= _BAR, "avx2": avx2, "threads": threads, "hours": round(default / 3600, 2)}
    return finish("distilling", {**body, **rates}, json_file)


def _rate(first: tuple[int, float], last: tuple[int, float]) -> float:
    return (last[0] - first[0]) / (last[1] - first[1])
