"""Arms take turns on every prompt, and what is judged of their samples."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_controller.cli.ask.figures import AnswerFigures

from benchmarks.arms import Sample, compared, summary, take_turns, turns


def sample(seconds: float, tokens: tuple[int, ...] = (1, 2), stolen: float = 0.0) -> Sample:
    count = len(tokens)
    figures = AnswerFigures(count, seconds, count - 1, seconds / 2, rounds=count, verified=4, accepted=3)
    return Sample(tokens, figures, stolen)


def test_who_begins_alternates_and_a_block_is_done_before_the_next_arm() -> None:
    assert list(turns(2, ["a", "b"])) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    blocks = [(0, "a"), (1, "a"), (0, "b"), (1, "b"), (2, "b"), (2, "a")]
    assert list(turns(3, ["a", "b"], block=2)) == blocks


async def test_every_arm_answers_every_prompt_once_after_a_warm_up() -> None:
    asked: list[tuple[str, str, int]] = []

    def arm(name: str) -> Any:
        async def ask(prompt: str, max_tokens: int) -> Sample:
            asked.append((name, prompt, max_tokens))
            return sample(1.0, (ord(prompt), ord(name)))

        return ask

    samples = await take_turns(["p", "q"], {"a": arm("a"), "b": arm("b")}, 40, "")
    assert asked[:2] == [("a", "p", 16), ("b", "p", 16)]
    assert asked[2:] == [("a", "p", 40), ("b", "p", 40), ("b", "q", 40), ("a", "q", 40)]
    assert [one.token_ids for one in samples["b"]] == [(ord("p"), ord("b")), (ord("q"), ord("b"))]
    assert all(0.0 <= one.stolen <= 1.0 for taken in samples.values() for one in taken)


def test_the_ratio_is_of_all_seconds_so_that_a_slow_prompt_counts_as_such() -> None:
    found = compared([sample(1.0), sample(9.0)], [sample(0.5), sample(9.5)])
    assert found["request_speedup"] == 1.0
    assert found["median_ratio"] == pytest.approx((2 + 9 / 9.5) / 2, abs=1e-4)


def test_a_text_counts_as_equal_only_token_by_token() -> None:
    found = compared([sample(1.0), sample(1.0)], [sample(1.0), sample(1.0, (1, 3))])
    assert (found["texts_equal"], found["num_prompts"]) == (1, 2)


def test_the_round_that_reads_the_prompt_is_no_decode_round() -> None:
    found = summary([sample(1.0, tuple(range(5)))] * 2)
    assert found["decode_round_ms"] == pytest.approx(1e3 * 1.0 / 8)


def test_stolen_time_is_weighted_by_the_time_it_was_stolen_in() -> None:
    assert summary([sample(1.0, stolen=0.4), sample(3.0)])["stolen"] == pytest.approx(0.1)
