"""Every prompt with speculation and without, one right after the other, so that a machine's drift cancels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider_controller.cli.client import Answer, Gateway
from outrider_controller.cli.figures import Figures
from outrider_controller.cli.progress import progress

from benchmarks.support.asking import make_request

PAIR_HEADER = ("PLAIN TOKENS/S", "SPECULATION", "×", "MEDIAN ×", "ACCEPTANCE", "TOKENS/ROUND", "TEXTS EQUAL", "VERDICT")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    plain: Answer
    auto: Answer

    @property
    def equal(self) -> bool:
        return self.plain.token_ids == self.auto.token_ids and self.plain.text == self.auto.text

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without, of the whole request."""
        return self.auto.tokens_per_second / self.plain.tokens_per_second if self.plain.tokens_per_second else 0.0


async def ask_both_ways(
    gateway: Gateway, model: str, prompts: Sequence[str], max_tokens: int, label: str
) -> list[Pair]:
    """Greedy; which of the two comes first alternates. Raises CommandError."""
    pairs = []
    with progress(label, len(prompts)) as report:
        for mode in ("auto", "off"):
            await gateway.answer(make_request(model, prompts[0], mode, max_tokens=16))
        for number, prompt in enumerate(prompts):
            answers: dict[str, Answer] = {}
            for mode in ("auto", "off") if number % 2 else ("off", "auto"):
                request = make_request(model, prompt, mode, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
                answers[mode] = await gateway.answer(request)
            pairs.append(Pair(answers["off"], answers["auto"]))
            report(number + 1, "")
    return pairs


def compared(pairs: Sequence[Pair], bound: float) -> dict[str, Any]:
    """What is judged is the ratio of the sums: seconds of all prompts, with speculation and without."""
    plain, auto = Figures.of([pair.plain for pair in pairs]), Figures.of([pair.auto for pair in pairs])
    ratio = auto.tokens_per_second / plain.tokens_per_second
    equal = sum(pair.equal for pair in pairs)
    return {
        "ratio": round(ratio, 4),
        "median_ratio": round(median(pair.ratio for pair in pairs), 4),
        "texts_equal": equal,
        "num_prompts": len(pairs),
        "holds": ratio >= bound and equal == len(pairs),
        "plain": plain.summary(),
        "speculation": auto.summary(),
    }


def pair_cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['plain']['tokens_per_second']:.1f}",
        f"{row['speculation']['tokens_per_second']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['median_ratio']:.2f}",
        f"{row['speculation']['acceptance']:.2f}",
        f"{row['speculation']['tokens_per_round']:.2f}",
        f"{row['texts_equal']} of {row['num_prompts']}",
        "holds" if row["holds"] else "FALLS SHORT",
    ]
