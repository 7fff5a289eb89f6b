"""Figures from whole answers: tokens per second by category, ratios to ours, equal texts, bars. Pure.

A rate is tokens over seconds, from the request to the last token, both summed over the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

OURS = "ours"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Answered:
    """One subject's answer to one prompt."""

    subject: str
    prompt: str
    category: str
    token_ids: tuple[int, ...]
    seconds: float
    first_s: float
    """Until the first token; for transformers until the end of the first forward."""
    steps: int
    """Forwards of the target model if the subject counts them; else 0."""
    cores: float | None = None
    """CPU time over wall time, including threads that spin, if the subject is one process."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A goal: one subject must be this many times as fast as the best of some others."""

    text: str
    others: tuple[str, ...]
    bound: float
    subject: str = OURS


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar, measured."""

    bar: Bar
    subject: str
    """The fastest subject of the bar."""
    ratio: float
    typical: float
    """The median of the ratios of single answers."""

    @property
    def met(self) -> bool:
        return self.ratio >= self.bar.bound


_KINDS, _MODES = ("", "-ngram", "-draft"), ("", "-compiled")
VLLM = tuple(f"vllm{kind}{mode}" for kind in _KINDS for mode in _MODES)
"""vLLM's own ways, without our plugin."""
BARS = (
    Bar("ours / best of vLLM", VLLM, 1.3),
    Bar("ours / transformers, assisted", ("assisted",), 2.0),
    *(
        Bar(f"vllm-outrider{mode} / vllm{kind}{mode}", (f"vllm{kind}{mode}",), 1.0, f"vllm-outrider{mode}")
        for kind in _KINDS
        for mode in _MODES
    ),
)


def subjects(answers: Sequence[Answered]) -> list[str]:
    """Names of the subjects, in order of their first answer."""
    return list(dict.fromkeys(answer.subject for answer in answers))


def categories(answers: Sequence[Answered]) -> list[str]:
    """Categories in alphabetical order, then the name for all of them together."""
    return [*sorted({answer.category for answer in answers}), ALL]


def of(answers: Sequence[Answered], subject: str, category: str = ALL) -> list[Answered]:
    return [a for a in answers if a.subject == subject and category in (ALL, a.category)]


def rate(answers: Sequence[Answered]) -> float:
    """Tokens per second."""
    return sum(len(a.token_ids) for a in answers) / sum(a.seconds for a in answers)


def rates(answers: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """Rates by subject, then by category."""
    return {s: {c: rate(of(answers, s, c)) for c in categories(answers)} for s in subjects(answers)}


def typical_ratio(answers: Sequence[Answered], subject: str, over: str = OURS) -> float:
    """The median, over the prompts, of the rate of `over` to the subject's."""
    theirs = {a.prompt: rate([a]) for a in of(answers, subject)}
    return median(rate([a]) / theirs[a.prompt] for a in of(answers, over))


def verdicts(answers: Sequence[Answered], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Verdicts on the bars whose subjects were measured."""
    totals = {subject: by_category[ALL] for subject, by_category in rates(answers).items()}
    found: list[Verdict] = []
    for bar in bars:
        named = [subject for subject in totals if subject in bar.others]
        if named and bar.subject in totals:
            best = max(named, key=totals.__getitem__)
            typical = typical_ratio(answers, best, bar.subject)
            found.append(Verdict(bar, best, totals[bar.subject] / totals[best], typical))
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Position of the first difference; None if they are equal."""
    if list(one) == list(other):
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def differences(answers: Sequence[Answered], subject: str) -> list[int | None]:
    """By prompt, the first position where the subject's answer differs from ours."""
    ours = {a.prompt: a.token_ids for a in of(answers, OURS)}
    return [first_difference(a.token_ids, ours[a.prompt]) for a in of(answers, subject)]


def tokens_per_step(answers: Sequence[Answered]) -> float | None:
    steps = sum(a.steps for a in answers)
    return sum(len(a.token_ids) for a in answers) / steps if steps else None


def summary(answers: Sequence[Answered]) -> dict[str, dict[str, Any]]:
    """The contents of the tables, by subject; for JSON."""
    found = rates(answers)
    return {subject: _about(answers, subject, found) for subject in found}


def _about(answers: Sequence[Answered], subject: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    own, differing = of(answers, subject), differences(answers, subject)
    per_step = tokens_per_step(own)
    return {
        "tokens_per_second": {category: round(value, 3) for category, value in found[subject].items()},
        "ours_ratio": {category: round(found[OURS][category] / v, 4) for category, v in found[subject].items()},
        "typical_ours_ratio": round(typical_ratio(answers, subject), 4),
        "tokens_per_step": round(per_step, 3) if per_step is not None else None,
        "first_token_ms": round(median(a.first_s for a in own) * 1e3, 1),
        "cores": _mean([a.cores for a in own if a.cores is not None]),
        "tokens": sum(len(a.token_ids) for a in own),
        "answers": len(own),
        "equal_to_ours": differing.count(None),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def rate_rows(summed: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Subject, then tokens/s by category."""
    return [[name, *(f"{v:.1f}" for v in about["tokens_per_second"].values())] for name, about in summed.items()]


def ratio_rows(summed: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Subject, then by category our rate over the subject's."""
    return [
        [name, *(f"{v:.2f}" for v in about["ours_ratio"].values()), f"{about['typical_ours_ratio']:.2f}"]
        for name, about in summed.items()
        if name != OURS
    ]


def subject_rows(summed: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Subject, tokens per step, median milliseconds to the first token, busy cores, answers equal to ours."""
    return [
        [
            name,
            f"{about['tokens_per_step']:.2f}" if about["tokens_per_step"] is not None else "",
            f"{about['first_token_ms']:.0f}",
            f"{about['cores']:.2f}" if about["cores"] is not None else "",
            f"{about['equal_to_ours']} of {about['answers']}",
        ]
        for name, about in summed.items()
    ]


def verdict_rows(found: Sequence[Verdict]) -> list[list[str]]:
    """Bar, its fastest subject, ratio, median of ratios, bound, whether it is met."""
    return [
        [
            v.bar.text,
            v.subject,
            f"{v.ratio:.3f}",
            f"{v.typical:.3f}",
            f">= {v.bar.bound:.2f}",
            "yes" if v.met else "NO",
        ]
        for v in found
    ]


def answer_rows(answers: Sequence[Answered]) -> list[dict[str, Any]]:
    """Every answer for JSON: counts and times, and its first difference from ours in place of its tokens."""
    ours = {a.prompt: a.token_ids for a in of(answers, OURS)}
    rows = []
    for answer in answers:
        row = asdict(answer)
        token_ids = row.pop("token_ids")
        rows.append(
            {**row, "tokens": len(token_ids), "leaves_ours_at": first_difference(token_ids, ours[row["prompt"]])}
        )
    return rows
