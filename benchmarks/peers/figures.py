"""Figures from samples: summaries, ratios within rounds, tables. Pure.

A ratio is the median, over the rounds, of ratios of medians within a round, where the subjects took turns seconds
apart: memory bandwidth changes by the minute, and changes between rounds cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

OURS = "ours"
Rounds = Sequence[Sequence[float]]
"""Milliseconds, sample by sample, round by round."""
Results = Mapping[str, Mapping[str, Rounds]]
"""By measure, then by subject."""

# A median ignores the few samples in which the core was taken away for a short time.
ENOUGH_OF_THE_CORE = 0.9


def undisturbed(shares: Sequence[Mapping[str, float]]) -> list[int]:
    """Rounds in which every subject had the core to itself, from the subjects' shares of it; all rounds if none."""
    return _clean(shares) or list(range(len(shares)))


def count_undisturbed(shares: Sequence[Mapping[str, float]]) -> int:
    return len(_clean(shares))


def _clean(shares: Sequence[Mapping[str, float]]) -> list[int]:
    return [number for number, share in enumerate(shares) if min(share.values()) >= ENOUGH_OF_THE_CORE]


def best(rounds: Rounds) -> float:
    return min(min(samples) for samples in rounds)


def typical(rounds: Rounds) -> float:
    """The median of all samples."""
    return median(sample for samples in rounds for sample in samples)


def ratio(above: Rounds, below: Rounds) -> float:
    """The ratio that the module's docstring defines."""
    return median(median(a) / median(b) for a, b in zip(above, below, strict=True))


def figure_rows(results: Results, batches: Mapping[str, int]) -> list[list[str]]:
    """Measure, series, minimum and median in ms; tokens/s at the median where a step gives `batches` tokens."""
    rows: list[list[str]] = []
    for measure, series in results.items():
        for name, rounds in series.items():
            rate = f"{batches[measure] / typical(rounds) * 1e3:.1f}" if measure in batches else ""
            rows.append([measure, name, f"{best(rounds):.2f}", f"{typical(rounds):.2f}", rate])
    return rows


def ratio_rows(results: Results) -> list[list[str]]:
    """Measure, peer, how many times as long as ours it takes: the ratio, and that of the best samples."""
    return [
        [measure, name, f"{ratio(rounds, series[OURS]):.3f}", f"{best(rounds) / best(series[OURS]):.3f}"]
        for measure, series in results.items()
        for name, rounds in series.items()
        if name != OURS
    ]
