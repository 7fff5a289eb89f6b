"""Log probabilities of what was committed, accepted tokens included, and of the prompt: those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider.engine import Engine, Row
from outrider.options.logprobs import LogprobsOptions, TokenLogprobs
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import LogitsOptions, SamplingParams, VerificationMode
from transformers import AutoModelForCausalLM

from tests.unit.target.harness import GREEDY, SAMPLED, Bench, Drafter, Liar, key, opening, prompts

TOP = 4
PROMPTS = prompts(40, longest=60)
ASKED = LogprobsOptions(TOP, prompt=True)


def asking(params: SamplingParams, **more: object) -> list[SequenceSpec]:
    return [replace(opening(prompt, params=params, **more), logprobs=ASKED) for prompt in PROMPTS]  # type: ignore[arg-type]


def run(tiny: Path, openings: list[SequenceSpec], *drafter: Drafter, **more: object) -> Bench:
    bench = Bench(tiny, num_blocks=640, **more)  # type: ignore[arg-type]
    bench.answer(openings, *drafter)
    return bench


def logprobs_of(bench: Bench, number: int) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Of the prompt, of the output."""
    commits = bench.answers[key(number)].commits
    assert all(len(commit.logprobs) == len(commit.token_ids) for commit in commits)
    assert not any(commit.prompt_logprobs for commit in commits[1:])
    return list(commits[0].prompt_logprobs), [each for commit in commits for each in commit.logprobs]


@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.slow), SAMPLED], ids=["greedy", "coupled"])
def test_they_are_those_of_transformers_with_drafts_and_without(tiny: Path, params: SamplingParams) -> None:
    plain = run(tiny, asking(params, speculation=Speculation()))
    texts = {number: plain.tokens[key(number)] for number in range(len(PROMPTS))}
    # In small chunks, with others, so that prompts come in parts.
    drafted = run(tiny, asking(params), Liar(texts, "random"), max_batch_tokens=24)
    assert sum(commit.num_accepted for answer in drafted.answers.values() for commit in answer.commits) > 100
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for number, text in texts.items():
        of_prompt, of_output = logprobs_of(plain, number)
        assert len(of_prompt) == len(PROMPTS[number]) - 1
        with torch.no_grad():
            wanted = torch.log_softmax(model(torch.tensor([text])).logits[0], -1)
        for at, each in enumerate([*of_prompt, *of_output], start=1):
            assert each.logprob == pytest.approx(float(wanted[at - 1, text[at]]), abs=1e-4)
            top = wanted[at - 1].topk(TOP)
            assert list(each.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)
            assert list(each.top_token_ids) == top.indices.tolist()
        again = logprobs_of(drafted, number)
        for one, other in zip([*of_prompt, *of_output], [*again[0], *again[1]], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert one.top_token_ids == other.top_token_ids


def test_they_are_the_model_s_own_whatever_is_asked_of_the_logits(tiny: Path) -> None:
    biased = [replace(each, logits=LogitsOptions(logit_bias=((40, 30.0),))) for each in asking(GREEDY)[:5]]
    bench = run(tiny, biased)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for number in range(5):
        text = bench.tokens[key(number)]
        with torch.no_grad():
            wanted = torch.log_softmax(model(torch.tensor([text])).logits[0], -1)
        _, of_output = logprobs_of(bench, number)
        for at, each in enumerate(of_output, start=len(PROMPTS[number])):
            assert each.logprob == pytest.approx(float(wanted[at - 1, text[at]]), abs=1e-4)


def test_the_prompt_s_come_once_also_after_a_preemption_and_from_a_warm_cache(tiny: Path) -> None:
    plain = run(tiny, asking(GREEDY))
    warm = Bench(tiny, num_blocks=40)
    for _ in range(2):
        warm.answer(asking(GREEDY))
    assert warm.worker.stats.num_preemptions
    for number in range(len(PROMPTS)):
        commits = warm.answers[key(number)].commits
        parts = [list(commit.prompt_logprobs) for commit in commits if commit.prompt_logprobs]
        wanted = logprobs_of(plain, number)[0]
        assert len(parts) == (2 if wanted else 0)
        for part in parts:
            # A prompt is read in other chunks here, and torch's products of other sizes round otherwise on some CPUs.
            assert [each.logprob for each in part] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
            assert [len(each.top_token_ids) for each in part] == [TOP] * len(wanted)


def test_a_sequence_taken_over_says_nothing_of_the_prompt_again(tiny: Path) -> None:
    bench = run(tiny, [replace(each, committed=(7, 8)) for each in asking(GREEDY)[:3]])
    for number in range(3):
        of_prompt, of_output = logprobs_of(bench, number)
        assert not of_prompt
        assert len(of_output) == 22


def test_in_ratio_mode_each_token_has_its_own(tiny: Path) -> None:
    bench = run(tiny, asking(SAMPLED, mode=VerificationMode.RATIO, speculation=Speculation())[:3])
    assert all(len(logprobs_of(bench, number)[1]) == 24 for number in range(3))


class Counting(Engine):
    """Notes the most rows of logits that a step has made."""

    most = 0

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.most = max(self.most, sum(row.num_logits for row in rows))
        return super().forward(rows)


def test_those_of_long_prompts_are_made_a_few_at_a_time_and_hold_up_no_other(tiny: Path) -> None:
    long = [replace(opening([5 + n] * 400, max_new_tokens=2), logprobs=ASKED) for n in range(3)]
    bench = Bench(tiny, max_batch_tokens=1600)
    bench.engine.__class__ = Counting
    for number, each in enumerate([*long, opening([9] * 300, max_new_tokens=2)]):
        bench.open(number, each)
    bench.step()
    assert bench.answers[key(3)].commits, "its prompt was run at once"
    bench.run()
    assert 250 < bench.engine.most <= 260  # type: ignore[attr-defined]
    assert [len(logprobs_of(bench, number)[0]) for number in range(3)] == [399] * 3
