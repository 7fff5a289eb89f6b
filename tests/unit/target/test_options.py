"""Options of the logits in a target worker on a real model: with drafts, without, and taken over in mid-answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import LogitsOptions, VerificationMode

from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Drafter, Liar, key, opening, prompts

STOP = 2
ASKED = {
    "penalties": LogitsOptions(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3),
    "rewards": LogitsOptions(frequency_penalty=-1.0, presence_penalty=-0.5),
    "bias": LogitsOptions(logit_bias=((40, 4.0), (41, 4.0), (42, -8.0))),
    "masks": LogitsOptions(
        allowed_token_ids=tuple(range(0, 384, 3)),
        bad_words=tuple((3 * i, 3 * i + 3) for i in range(1, 100)),
        min_tokens=9,
    ),
}
QUICK = ("penalties", "masks")
PROMPTS = prompts(14, longest=30)


def asking(options: LogitsOptions | None, sampled: bool, **more: object) -> list[SequenceSpec]:
    return [
        replace(opening(prompt, params=SAMPLED if sampled else GREEDY, stops=[STOP], **more), logits=options)  # type: ignore[arg-type]
        for prompt in PROMPTS
    ]


def texts(tiny: Path, openings: list[SequenceSpec], *drafter: Drafter) -> dict[int, list[int]]:
    bench = Bench(tiny, num_blocks=512)
    found = bench.answer(openings, *drafter)
    assert not bench.worker.stats.num_source_failures
    assert not any(answer.errors for answer in bench.answers.values())
    assert all(bench.answers[key(number)].finish is not Finish.NONE for number in range(len(openings)))
    return found


@pytest.mark.parametrize("sampled", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ASKED]
)
def test_texts_are_equal_with_drafts_and_when_taken_over(tiny: Path, name: str, sampled: bool) -> None:
    plain = texts(tiny, asking(ASKED[name], sampled, speculation=Speculation()))
    assert plain != texts(tiny, asking(None, sampled, speculation=Speculation())), "the option does something"
    for how in ("right", "random", "beside"):
        assert texts(tiny, asking(ASKED[name], sampled), Liar(plain, how)) == plain
    half = [
        replace(each, committed=tuple(plain[number][len(each.prompt) :][:7]))
        for number, each in enumerate(asking(ASKED[name], sampled))
    ]
    going_on = [number for number, each in enumerate(half) if STOP not in each.committed]
    taken_over = texts(
        tiny, [half[number] for number in going_on], Liar({i: plain[n] for i, n in enumerate(going_on)}, "right")
    )
    assert list(taken_over.values()) == [plain[number] for number in going_on]
    assert len(going_on) > 10


def test_masks_hold_in_ratio_mode_too(tiny: Path) -> None:
    options = ASKED["masks"]
    plain = texts(tiny, asking(options, True, mode=VerificationMode.RATIO, speculation=Speculation()))
    for number, each in enumerate(PROMPTS):
        output = plain[number][len(each) :]
        assert set(output) <= set(options.allowed_token_ids)
        assert STOP not in output[: options.min_tokens]
        assert not set(itertools.pairwise(output)) & set(options.bad_words)
