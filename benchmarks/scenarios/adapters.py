"""python -m benchmarks adapters"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from outrider.drafters import load_drafter
from outrider.engine import EngineConfig, resolve
from outrider.engine.loading.draft_checkpoint import load_draft_model
from outrider.engine.models.adapters import save_adapter
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.training.adapter_student import ADAPTED
from outrider_controller.cli.output import json_file_option

from benchmarks.report import finish, show, table

_BATCH, _ROUNDS, _TURNS = 16, 10, 12


@click.command("adapters")
@click.option("--draft-model", default="smollm2-135m-draft", show_default=True, metavar="PATH|NAME")
@click.option("--rank", type=click.IntRange(1), default=8, show_default=True)
@click.option("--count", type=click.IntRange(_BATCH), default=100, show_default=True, help="Adapters of one worker.")
@json_file_option
def adapters(draft_model: str, rank: int, count: int, json_file: Path | None) -> int:
    """What do many adapters cost a draft worker: in memory, and in a batch in which each sequence has another?

    On one core, in time of its thread; adapters have random weights. A round is a proposal of four tokens for each of
    16 sequences. The ways take turns.
    """
    torch.set_num_threads(1)
    base = resolve(draft_model)
    with tempfile.TemporaryDirectory() as kept:
        paths = _made(base, Path(kept), rank, count)
        spawning = multiprocessing.get_context("spawn")
        with spawning.Pool(1, maxtasksperchild=1) as pool:
            memory = {number: pool.apply(_bytes, (base, paths[:number])) for number in (1, count)}
        took = _rounds(base, paths)
    rows = [{"adapters in a batch": name, "ms": 1e3 * s, "x none": s / took["none"]} for name, s in took.items()]
    grown = memory[count] / memory[1]
    show(
        table(rows), f"memory: {memory[1] / 1e6:.0f} MB with one, {memory[count] / 1e6:.0f} with {count}: {grown:.2f} x"
    )
    body = {"rows": rows, "memory": {str(number): size for number, size in memory.items()}, "grown": grown}
    return finish("adapters", body, json_file)


def _made(base: Path, kept: Path, rank: int, count: int) -> list[Path]:
    model, _ = load_draft_model(base, torch.float32)
    modules = {name: one for name, one in model.named_modules() if name.rpartition(".")[2] in ADAPTED}
    for number in range(count):
        drawn = torch.Generator().manual_seed(number)

        def noise(*size: int, drawn: torch.Generator = drawn) -> torch.Tensor:
            return 0.03 * torch.randn(*size, generator=drawn)

        pairs = {name: (noise(rank, one.in_features), noise(one.out_features, rank)) for name, one in modules.items()}
        save_adapter(kept / f"tenant-{number}", pairs, base=str(base), alpha=2.0 * rank)
    return [kept / f"tenant-{number}" for number in range(count)]


def _load(base: Path, paths: Sequence[Path]) -> Any:
    return load_drafter(base, engine=EngineConfig(), adapters={path.name: path for path in paths})


def _bytes(base: Path, paths: Sequence[Path]) -> int:
    torch.set_num_threads(1)
    kept = _load(base, paths)
    size: int = psutil.Process().memory_info().rss
    del kept
    return size


def _rounds(base: Path, paths: Sequence[Path]) -> dict[str, float]:
    """Seconds of a round; the median."""
    drafter = _load(base, paths)
    ways = {"none": [""] * _BATCH, "one": [paths[0].name] * _BATCH, f"{_BATCH}": [path.name for path in paths[:_BATCH]]}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS):
        for name, tenants in ways.items():
            sequences = [drafter.open(_spec(tenant, number)) for number, tenant in enumerate(tenants)]
            drafter.draft(sequences)
            for _ in range(_ROUNDS):
                for sequence in sequences:
                    drafter.commit(sequence, sequence.committed_len, [7])
                started_s = time.thread_time()
                drafter.draft(sequences)
                times[name] += [time.thread_time() - started_s] * (turn > 0)
            for sequence in sequences:
                drafter.close(sequence)
    return {name: statistics.median(each) for name, each in times.items()}


def _spec(tenant: str, number: int) -> SequenceSpec:
    params, salt = SamplingParams(temperature=0.0), f"{tenant} {number}".encode()
    prompt = tuple(range(100 + number, 160 + number))
    return SequenceSpec(prompt, params, VerificationMode.GREEDY, speculation=Speculation(4), salt=salt, tenant=tenant)
