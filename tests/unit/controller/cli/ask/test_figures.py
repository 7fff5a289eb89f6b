"""What is computed from answers, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.rpc.v1 import generation_pb2 as generation
from outrider.rpc.v1 import router_pb2 as router
from outrider_controller.cli.ask.demo import Painter, make_report
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.client import GatewayAnswer
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.output import columns, table_lines

from benchmarks.scenarios.exactness import compare
from benchmarks.support.progress import Progress
from benchmarks.support.prompts import read_prompts, spread


def answer(text: str, token_ids: list[int], seconds: float = 2.0, **sums: int) -> GatewayAnswer:
    metrics = generation.Metrics(speculative_decoding=router.RequestMetrics(**sums))
    return GatewayAnswer(text, token_ids, "length", metrics=metrics, seconds=seconds, first_token_s=0.5)


def test_acceptance_counts_what_was_verified_and_rounds_what_was_stepped() -> None:
    counted = {"num_steps": 4, "num_draft_tokens": 20, "num_verified_tokens": 10, "num_accepted_draft_tokens": 6}
    figures = AnswerFigures.of([answer("a", list(range(10)), **counted, round_us=8000, draft_us=2000, verify_us=5000)])
    assert figures.acceptance == 0.6
    assert figures.tokens_per_round == 2.5
    assert figures.tokens_per_second == 5.0
    assert figures.decode_tokens_per_second == 6.0
    assert (figures.round_ms, figures.draft_ms, figures.verify_ms, figures.wire_ms) == (2.0, 0.5, 1.25, 0.25)


def test_nothing_measured_is_zero_and_not_an_error() -> None:
    assert AnswerFigures.of([]).summary()["acceptance"] == 0.0


def test_the_demo_tells_equal_from_different_texts() -> None:
    same = make_report(answer("ab", [1, 2], 2.0), answer("ab", [1, 2], 1.0))
    assert same["texts_equal"] and same["speedup"] == 2.0
    assert not make_report(answer("ab", [1, 2]), answer("ab", [1, 3]))["texts_equal"]
    assert not make_report(answer("ab", [1, 2]), answer("ac", [1, 2]))["texts_equal"]


def test_a_comparison_names_the_prompts_whose_texts_differ() -> None:
    plain, other = [answer("a", [1]), answer("b", [2])], [answer("a", [1]), answer("c", [3])]
    found = compare("greedy", "float32", "on", plain, other)
    assert (found.equal, found.different) == (1, [1])


def test_numbers_stand_to_the_right() -> None:
    assert columns(["NAME", "N"], [["a", 5], ["bcdef", 100]]) == "NAME     N\na        5\nbcdef  100"


def test_progress_without_a_terminal_is_a_line_for_each_tenth() -> None:
    times: Iterator[float] = iter(range(100))
    said: list[str] = []
    lines = Progress("work", 40, said.append, lambda: next(times))
    for done in range(1, 41):
        lines(done, "")
    assert len(said) == 10
    assert said[0] == "work: 10 % (4/40, 1 s)"


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    rows = [f'{{"id": {i}, "category": "{c}", "turns": ["t{i}"]}}' for i, c in enumerate(["qa"] * 6 + ["math"] * 3)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*rows, '{"id": "x", "prompt": "p"}']) + "\n")
    return file


def test_prompts_are_spread_over_categories_and_within_them(prompts_file: Path) -> None:
    prompts = read_prompts(prompts_file)
    assert [p.id for p in spread(prompts, 5)] == ["0", "3", "6", "7", "x"]
    assert len(spread(prompts, 100)) == 10
    # Spec-Bench's sub-categories of multi-turn questions count as one.
    assert {p.category for p in prompts} == {"qa", "multi-turn", "all"}


def test_a_line_without_a_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": 1, "prompt": "p"}\n{"id": 2}\n')
    with pytest.raises(CommandError, match="line 2"):
        read_prompts(file)


def test_only_accepted_drafts_are_coloured(tiny: Path) -> None:
    painter = Painter(tiny)
    ids = {letter: painter._tokenizer.encode(letter).ids[0] for letter in "abc"}
    chunk = generation.StreamGenerateResponse(text="abc", token_ids=[ids[c] for c in "abc"], num_accepted=2)
    assert painter.paint(chunk) == "\x1b[32mab\x1b[0mc"
    assert painter.paint(generation.StreamGenerateResponse(text="a", token_ids=[ids["a"]])) == "a"


def test_large_sums_keep_their_digits_and_rates_are_short_in_a_table() -> None:
    rows = [{"tokens_per_minute": 1234567.891, "draft_s": 1.3297099}]
    assert [line.split() for line in table_lines(rows, tuple(rows[0]))] == [
        ["TOKENS/MIN", "DRAFT-S"],
        ["1234567.891", "1.33"],
    ]
