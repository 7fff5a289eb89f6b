"""python -m tests.simulation"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from outrider.hardware import hardware
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import columns, json_file_option, note, write_json

from benchmarks.support.progress import Progress

if TYPE_CHECKING:
    from tests.simulation import Outcome

_CHUNK = 25
_SHOWN_VIOLATIONS = 10


@click.command("simulation")
@click.option("--schedules", type=click.IntRange(1), default=5000, show_default=True, help="Random schedules to run.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first; others count on.")
@click.option("--trace", is_flag=True, help="Print all that happens in virtual time. One schedule only.")
@json_file_option
def simulation(schedules: int, seed: int, trace: bool, json_file: Path | None) -> int:
    """Does any interleaving of delays, deaths and lies break a promise?

    Runs gateway, routers, targets and drafts as shipped, in virtual time, over simulated links, with a model whose text
    is known. Checks: the text is the target's, positions come once and in order, every request ends and for a reason,
    everything is given back, and the next request is served. A violation is repeated by its seed:
    --seed S --schedules 1 --trace.
    """
    _require()
    if trace and schedules != 1:
        raise click.UsageError("--trace needs --schedules 1")
    started_s = time.monotonic()
    outcomes = [_traced(seed)] if trace else run_all(seed, schedules)
    elapsed_s = time.monotonic() - started_s
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    violating = [outcome for outcome in outcomes if outcome.violations]
    click.echo(_table(counts))
    click.echo()
    virtual_s = sum(outcome.virtual_s for outcome in outcomes)
    click.echo(f"{schedules} schedules, {virtual_s:.0f} s of virtual time in {elapsed_s:.0f} s")
    click.echo(f"violations: {len(violating)} schedules")
    for outcome in violating[:_SHOWN_VIOLATIONS]:
        click.echo(f"  seed {outcome.seed}: {outcome.violations[0]}")
    report = {
        "schedules": schedules,
        "first_seed": seed,
        "violating": {str(outcome.seed): outcome.violations for outcome in violating},
        "num_violating": len(violating),
        "counts": dict(sorted(counts.items())),
        "virtual_s": round(virtual_s, 1),
        "elapsed_s": round(elapsed_s, 1),
        "hardware": hardware(),
    }
    write_json(json_file, "bench-simulation", report)
    return ExitCode.ERROR if violating else ExitCode.OK


def _require() -> None:
    try:
        import tests.simulation  # noqa: F401
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'outrider[engine,gateway]'") from error


def _traced(seed: int) -> Outcome:
    from tests.simulation import draw, run_schedule

    return run_schedule(draw(seed), click.echo)


def run_all(first: int, count: int) -> list[Outcome]:
    """Runs on all cores. Outcomes are in the order of seeds."""
    chunks = [range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)]
    if len(chunks) == 1:
        return run_seeds(chunks[0])
    found: list[Outcome] = []
    # Spawned: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), len(chunks)), mp_context=get_context("spawn"))
    report = Progress("schedules", count)
    with pool:
        for future in as_completed([pool.submit(run_seeds, chunk) for chunk in chunks]):
            found += future.result()
            for outcome in future.result():
                if outcome.violations:
                    note(f"seed {outcome.seed}: {outcome.violations[0]}")
            report(len(found), "")
    return sorted(found, key=lambda outcome: outcome.seed)


def run_seeds(seeds: range) -> list[Outcome]:
    """Runs the seeds in this process, one after the other."""
    import torch

    from tests.simulation import draw, run_schedule

    torch.set_num_threads(1)
    # Imported objects outlive all schedules, so the collector need not scan them in each.
    gc.freeze()
    return [run_schedule(draw(seed)) for seed in seeds]


def _table(counts: Counter[str]) -> str:
    rows: list[list[Any]] = [[name, count] for name, count in sorted(counts.items()) if count]
    return columns(["WHAT THE SCHEDULES WENT THROUGH", "TIMES"], rows)
