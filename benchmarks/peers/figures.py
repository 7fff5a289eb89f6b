"""Figures from samples: summaries, ratios within rounds, goals, tables. Pure.

A ratio is the median, over the rounds, of ratios of medians within a round, where the subjects took turns seconds
apart: memory bandwidth changes by the minute, and changes between rounds cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[Sequence[float]]
"""Milliseconds, sample by sample, round by round."""
Results = Mapping[str, Mapping[str, Rounds]]
"""By measure, then by series: a subject, or one of several measurements of ours."""

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
    # What they cost is stated, and not bounded.
    *(
        Goal(f"{measure}: vLLM with our settings / without", measure, "vllm-outrider", "vllm", math.inf, True)
        for measure in ("decode 1", "decode 16", "decode 32", "prefill 1000")
    ),
    Goal("speed, batch 1: ours / transformers", "decode 1", "transformers", "ours", 1.9, False),
    Goal("step / (weight bytes / read bandwidth)", "limit", "step", "read", 1.7, True),
    Goal("verify 5 positions / decode 1", "verify 5", "many", "one", 1.15, True),
    Goal("time to first token: prefix hit / miss", "prefix 1500", "hit", "miss", 0.10, True),
)


def undisturbed(shares: Sequence[Mapping[str, float]]) -> list[int]:
    """Rounds in which every subject had the core to itself, from the subjects' shares of it; all rounds if none."""
    return _clean(shares) or list(range(len(shares)))


def count_undisturbed(shares: Sequence[Mapping[str, float]]) -> int:
    return len(_clean(shares))


def _clean(shares: Sequence[Mapping[str, float]]) -> list[int]:
    return [number for number, share in enumerate(shares) if min(share.values()) >= ENOUGH_OF_THE_CORE]


def by_series(turn: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Replies by subject → samples by series: "ms" is the subject's own, "step_ms" is the series "step"."""
    return {
        name if key == "ms" else key.removesuffix("_ms"): list(samples)
        for name, reply in turn.items()
        for key, samples in reply.items()
        if key.endswith("ms")
    }


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
