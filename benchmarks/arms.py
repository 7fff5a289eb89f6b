"""The A/B runner of all benchmarks: every arm answers every prompt, in turns, so that a machine's drift hits all arms
equally.

Knows samples and sums, but no kind of arm.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import psutil
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import GatewayAnswer

from benchmarks.support.progress import Progress

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, answered by one arm."""

    token_ids: tuple[int, ...]
    figures: AnswerFigures
    stolen: float = 0.0
    """Share of this machine's processor time that its host gave to other machines (steal)."""

    @classmethod
    def of(cls, answer: GatewayAnswer) -> Sample:
        return cls(tuple(answer.token_ids), AnswerFigures.of([answer]))


Ask = Callable[[str, int], Awaitable[Sample]]
"""A prompt, and the most tokens of its answer."""
Samples = dict[str, list[Sample]]
"""Arm → samples, in the order of the prompts."""


def turns(count: int, arms: Sequence[str], block: int = 1) -> Iterator[tuple[int, str]]:
    """(number, arm): the arms take turns with blocks of numbers; the first arm alternates."""
    for start in range(0, count, block):
        for arm in arms if start // block % 2 == 0 else reversed(arms):
            for number in range(start, min(start + block, count)):
                yield number, arm


async def take_turns(
    prompts: Sequence[str], arms: Mapping[str, Ask], max_tokens: int, label: str, block: int = 1
) -> Samples:
    """Samples of all arms. Each arm warms up on the first prompt. Raises an arm's error."""
    samples: Samples = {arm: [] for arm in arms}
    report = Progress(label, len(prompts) * len(arms))
    for ask in arms.values():
        await ask(prompts[0], min(_WARM_UP_TOKENS, max_tokens))
    for done, (number, arm) in enumerate(turns(len(prompts), list(arms), block), 1):
        samples[arm].append(await _with_steal(arms[arm], prompts[number], max_tokens))
        report(done, "")
    return samples


async def _with_steal(ask: Ask, prompt: str, max_tokens: int) -> Sample:
    before = psutil.cpu_times()._asdict()
    sample = await ask(prompt, max_tokens)
    after = psutil.cpu_times()._asdict()
    # The time of this machine's guests is already in its user time.
    passed = {name: spent - before[name] for name, spent in after.items() if not name.startswith("guest")}
    all_s = sum(passed.values())
    return replace(sample, stolen=passed.get("steal", 0.0) / all_s if all_s else 0.0)


def total(samples: Sequence[Sample]) -> AnswerFigures:
    """Sums over the samples."""
    return AnswerFigures(*map(sum, zip(*(astuple(sample.figures) for sample in samples), strict=True)))


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of one arm. `stolen` is weighted by time; `decode_round_ms` excludes the prefill round."""
    figures = total(samples)
    rounds = figures.rounds - len(samples)
    stolen_s = sum(sample.stolen * sample.figures.seconds for sample in samples)
    return {
        **figures.summary(),
        "decode_round_ms": round(figures.decode_s * 1e3 / rounds, 3) if rounds > 0 else 0.0,
        "stolen": round(stolen_s / figures.seconds, 4) if figures.seconds else 0.0,
    }


def compared(base: Sequence[Sample], other: Sequence[Sample]) -> dict[str, Any]:
    """Speed-ups of `other` over `base`, as ratios of sums: a slow prompt has more weight."""
    a, b = total(base), total(other)
    return {
        "request_speedup": round(_ratio(b.tokens_per_second, a.tokens_per_second), 4),
        "decode_speedup": round(_ratio(b.decode_tokens_per_second, a.decode_tokens_per_second), 4),
        "median_ratio": round(median(_speedup(x, y) for x, y in zip(base, other, strict=True)), 4),
        "texts_equal": sum(x.token_ids == y.token_ids for x, y in zip(base, other, strict=True)),
        "num_prompts": len(base),
    }


def _speedup(base: Sample, other: Sample) -> float:
    return _ratio(other.figures.tokens_per_second, base.figures.tokens_per_second)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
