"""Two workers in one process, in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.drafters import load_drafter
from outrider.engine import EngineConfig
from outrider.engine.loading.loader import load_engine
from outrider.errors import InvalidRequest
from outrider.local import Speculator
from outrider.sim.pair import Pair
from outrider.speculation import SamplingParams

CONFIG = EngineConfig(dtype="float32", num_blocks=256)
PROMPTS = [[40 + i, 41, 42, 43 + i % 3, 40 + i, 41] for i in range(9)]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Pair:
    """The draft has the target's own weights, so its guesses are good."""
    drafter = load_drafter(tiny, engine=CONFIG)
    return Pair(load_engine(tiny, CONFIG), drafter, max_sequences=4, row_price=lambda _: 0.0)


@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "coupled"])
def test_speculation_takes_fewer_steps_to_the_same_tokens(pair: Pair, params: SamplingParams | None) -> None:
    plain = pair.answer(PROMPTS, 20, speculate=False, params=params)
    speculative = pair.answer(PROMPTS, 20, speculate=True, params=params)
    assert [a.token_ids for a in plain] == [a.token_ids for a in speculative]
    assert all(a.finished and a.num_steps == len(a.token_ids) and not a.num_verified for a in plain)
    assert sum(a.num_steps for a in speculative) < 0.7 * sum(a.num_steps for a in plain)
    assert sum(a.num_accepted for a in speculative) > 20


def test_a_drafter_is_bounded_apart_from_what_the_target_looks_up(tiny: Path) -> None:
    drafter = load_drafter(tiny, engine=CONFIG)
    alone = Pair(load_engine(tiny, CONFIG), drafter, max_draft_tokens=2, lookups=(), row_price=lambda _: 0.0)
    answers = alone.answer(PROMPTS, 20, speculate=True)
    assert 0 < sum(a.num_verified for a in answers) <= 2 * sum(a.num_steps for a in answers)
    repeating = Pair(load_engine(tiny, CONFIG), None, max_draft_tokens=2, row_price=lambda _: 0.0)
    predicted = [answer.token_ids for answer in answers]
    again = repeating.answer(PROMPTS, 20, speculate=True, predictions=predicted)
    assert [a.token_ids for a in again] == predicted and sum(a.num_steps for a in again) == len(PROMPTS)


def test_answers_come_in_the_order_of_their_prompts(pair: Pair) -> None:
    together = pair.answer(PROMPTS, 8, speculate=True)
    alone = [pair.answer([prompt], 8, speculate=True)[0] for prompt in PROMPTS]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_every_block_is_given_back(tiny: Path) -> None:
    target = load_engine(tiny, CONFIG)
    drafter = load_drafter(tiny, engine=CONFIG)
    Pair(target, drafter, max_sequences=3).answer(PROMPTS, 12, speculate=True)
    assert target.kv.num_free_blocks == drafter.num_free_blocks == 256


def test_a_prompt_that_does_not_fit_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        pair.answer([[5] * 600], 4, speculate=True)


@pytest.fixture(scope="module")
def speculator(tiny: Path) -> Speculator:
    return Speculator(tiny, tiny, dtype="float32", max_sequences=4)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "coupled"])
def test_text_with_speculation_is_the_text_without(speculator: Speculator, sampling: SamplingParams | None) -> None:
    prompts = ["Why is the sky blue?", "Name three rivers.", PROMPTS[0]]
    plain = speculator.generate(prompts, max_new_tokens=16, sampling=sampling, speculate=False)
    speculative = speculator.generate(prompts, max_new_tokens=16, sampling=sampling)
    assert [c.text for c in plain] == [c.text for c in speculative]
    assert [c.token_ids for c in plain] == [c.token_ids for c in speculative]
    assert sum(c.num_steps for c in speculative) < sum(c.num_steps for c in plain)
    assert all(not c.num_accepted for c in plain) and any(c.num_accepted for c in speculative)


def test_without_a_draft_the_text_so_far_is_the_guess(tiny: Path, speculator: Speculator) -> None:
    alone = Speculator(tiny, dtype="float32")
    question = ["one two three one two three one two"]
    [guessed] = alone.generate(question, max_new_tokens=24)
    assert guessed.token_ids == speculator.generate(question, max_new_tokens=24)[0].token_ids
