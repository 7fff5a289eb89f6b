"""Figures from samples: summaries, ratios within rounds, goals, tables. Pure.

A ratio is the median, over the rounds, of ratios of medians within a round, where the subjects took turns seconds
apart: memory bandwidth changes by the minute, and changes between rounds cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[Sequence[float]]
"""Milliseconds, sample by sample, round by round."""
Results = Mapping[str, Mapping[str, Rounds]]
"""By measure, then by subject."""

# A median ignores the few samples in which the core was taken away for a short time.
ENOUGH_OF_THE_CORE = 0.9


@dataclass(frozen=True, slots=True)
class Goal:
    """An upper or lower bound on the ratio of two series of a measure."""

    text: str
    measure: str
    above: str
    below: str
    bound: float
    at_most: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal, measured."""

    goal: Goal
    value: float
    of_minima: float
    """The same ratio of the best samples."""

    @property
    def met(self) -> bool:
        return self.value <= self.goal.bound if self.goal.at_most else self.value >= self.goal.bound


def _against(peer: str, called: str) -> tuple[Goal, ...]:
    return (
        Goal(f"step, batch 1: ours / {called}", "decode 1", "ours", peer, 0.95, True),
        Goal(f"tokens/s, batch 16: ours / {called}", "decode 16", peer, "ours", 1.0, False),
        Goal(f"tokens/s, batch 32: ours / {called}", "decode 32", peer, "ours", 1.0, False),
        Goal(f"speed of prefill: ours / {called}", "prefill 1000", peer, "ours", 1.0, False),
    )


GOALS = (
    *_against("vllm", "vLLM"),
    *_against("vllm-compiled", "compiled vLLM"),
    Goal("speed, batch 1: ours / transformers", "decode 1", "transformers", "ours", 1.9, False),
)


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


def verdicts(results: Results, goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """Verdicts on the goals whose series were measured."""
    found: list[Verdict] = []
    for goal in goals:
        series = results.get(goal.measure, {})
        if goal.above in series and goal.below in series:
            above, below = series[goal.above], series[goal.below]
            found.append(Verdict(goal, ratio(above, below), best(above) / best(below)))
    return found


def figure_rows(results: Results, batches: Mapping[str, int]) -> list[list[str]]:
    """Measure, series, minimum and median in ms; tokens/s at the median where a step gives `batches` tokens."""
    rows: list[list[str]] = []
    for measure, series in results.items():
        for name, rounds in series.items():
            rate = f"{batches[measure] / typical(rounds) * 1e3:.1f}" if measure in batches else ""
            rows.append([measure, name, f"{best(rounds):.2f}", f"{typical(rounds):.2f}", rate])
    return rows


def verdict_rows(found: Sequence[Verdict]) -> list[list[str]]:
    """Goal, value, value of minima, bound, whether it is met."""
    return [
        [
            v.goal.text,
            f"{v.value:.3f}",
            f"{v.of_minima:.3f}",
            f"{'<=' if v.goal.at_most else '>='} {v.goal.bound:.2f}",
            "yes" if v.met else "NO",
        ]
        for v in found
    ]
