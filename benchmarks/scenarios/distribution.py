"""python -m benchmarks distribution"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import click
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import json_file_option

from benchmarks.report import Row, finish, show, table
from benchmarks.support.progress import Progress

if TYPE_CHECKING:
    from benchmarks.support.distribution import DistributionResult

_Run = tuple[str, bool, str]
# Verification mode, or the conditions of two workers (a name of support.pair_distribution.Conditions); whether it
# speculates; planted fault (a name of support.distribution.Fault).
_RUNS: tuple[_Run, ...] = (
    ("ratio", False, "NONE"),
    ("ratio", True, "NONE"),
    ("coupled", True, "NONE"),
    ("ANY", True, "NONE"),
    ("MERGED", True, "NONE"),
    ("CROSSING", True, "NONE"),
    ("BORDERLINE", True, "NONE"),
    ("PRICED", True, "NONE"),
    ("ratio", True, "NOISE_REUSED"),
    ("ratio", True, "Q_TRUNCATED"),
    ("ratio", True, "RECOVERY_FROM_P"),
    ("CROSSING", True, "MATCH_TAKES_OVER"),
    ("BORDERLINE", True, "LENGTH_FOLLOWS_THE_DRAW"),
    ("PRICED", True, "PRICED_BY_THE_DRAW"),
    *((f"{mode}, {asked}", True, "NONE") for mode in ("ratio", "coupled") for asked in ("penalties", "masks")),
    ("ratio, penalties", True, "STATE_BY_STEPS"),
    ("ratio, penalties", True, "REJECTED_COUNTED"),
    ("ratio, penalties", True, "MASK_OF_ANOTHER_POSITION"),
    ("ratio, masks", True, "STATE_BY_STEPS"),
    ("ratio, masks", True, "MASK_OF_ANOTHER_POSITION"),
)
_PAIRS = {
    "ANY": "ratio, two workers",
    "MERGED": "ratio, all sources",
    "CROSSING": "ratio, a match that changes",
    "BORDERLINE": "ratio, barely in time",
    "PRICED": "ratio, rows have a price",
}
# A draw under options takes about four times as long.
_OPTIONS_DRAWS_SHARE = 0.25
# A draw of two workers takes ten times as long as one of the two functions alone.
_PAIR_DRAWS_SHARE = 0.1


@click.command("distribution")
@click.option("--draws", type=click.IntRange(1000), default=200_000, show_default=True, help="Tokens of each run.")
@click.option(
    "--only", "modes", multiple=True, type=click.Choice(sorted({mode for mode, _, _ in _RUNS})), help="Of the runs."
)
@json_file_option
def distribution(draws: int, modes: tuple[str, ...], json_file: Path | None) -> int:
    """Does sampling with speculation follow the target's distribution?

    Draws tokens from a model of 24 tokens whose distribution is known, and compares: total variation and chi-square,
    over every context: of the functions that draft and verify, and of a draft worker and a target worker that talk to
    each other, alone and beside every kind of source that a target has. Then with penalties and masks. Then plants nine
    faults that engines have had; the comparison must find each.
    """
    try:
        import benchmarks.support.distribution  # noqa: F401
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: pip install 'outrider[dev]'") from error
    chosen = [run for run in _RUNS if not modes or run[0] in modes]
    results = _measure(chosen, draws)
    wanted = [fault == "NONE" for _, _, fault in chosen]
    holds = [result.passed for result in results] == wanted
    show(table(list(map(_row, chosen, results))))
    runs = [
        {"speculation": speculates, **asdict(result), "passed": result.passed}
        for (_, speculates, _), result in zip(chosen, results, strict=True)
    ]
    return finish("distribution", {"holds": holds, "runs": runs}, json_file)


def _measure(runs: Sequence[_Run], draws: int) -> list[DistributionResult]:
    """Measures all runs, one per core at a time."""
    cores = len(os.sched_getaffinity(0))
    # Spawned: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(min(cores, len(runs)), mp_context=get_context("spawn"))
    report = Progress("runs", len(runs))
    with pool:
        running = [pool.submit(_run, mode, speculates, fault, draws) for mode, speculates, fault in runs]
        for done, _ in enumerate(as_completed(running), 1):
            report(done, "")
        return [future.result() for future in running]


def _run(mode: str, speculates: bool, fault: str, draws: int) -> DistributionResult:
    import torch
    from outrider.speculation import VerificationMode

    from benchmarks.support.distribution import Fault, run_experiment

    torch.set_num_threads(1)
    if mode in _PAIRS:
        from benchmarks.support.pair_distribution import Conditions, run_pair_experiment

        return run_pair_experiment(
            draws=round(draws * _PAIR_DRAWS_SHARE), conditions=Conditions[mode], fault=Fault[fault]
        )
    base, _, asked = mode.partition(", ")
    if asked in ("penalties", "masks"):
        from benchmarks.support.options_distribution import Asked, run_options_experiment

        return run_options_experiment(
            Asked[asked.upper()],
            VerificationMode(base),
            draws=round(draws * _OPTIONS_DRAWS_SHARE),
            fault=Fault[fault],
        )
    return run_experiment(VerificationMode(mode), draws=draws, fault=Fault[fault], speculate=speculates)


def _row(run: _Run, result: DistributionResult) -> Row:
    mode, speculates, fault = run
    verdicts = ("DEVIATES", "follows it") if fault == "NONE" else ("found", "NOT FOUND")
    return {
        "MODE": _PAIRS.get(mode, mode) if speculates else "plain sampling",
        "FAULT": None if fault == "NONE" else result.fault,
        "DRAWS": result.draws,
        "ACCEPTED": f"{result.accepted:.2f}" if speculates else None,
        "TOTAL VARIATION": f"{result.total_variation:.4f}",
        "BOUND": f"{result.total_variation_bound:.4f}",
        "CHI-SQUARE": f"{result.chi_square:.0f}",
        "DF": result.degrees_of_freedom,
        "P": f"{result.p_value:.2g}",
        "VERDICT": verdicts[result.passed],
    }
