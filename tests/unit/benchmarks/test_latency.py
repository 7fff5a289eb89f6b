"""python -m benchmarks latency: what must hold under which condition, and what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_controller.cli.ask.figures import AnswerFigures
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

from benchmarks.__main__ import run as bench
from benchmarks.arms import Sample
from benchmarks.report import table
from benchmarks.scenarios.latency import Condition, outcome, prepare, rows
from benchmarks.support.prompts import Prompt

PROMPTS = [Prompt("1", "qa", "?"), Prompt("2", "code", "!")]


def samples(seconds: float, tokens: tuple[int, ...] = (1, 2, 3)) -> list[Sample]:
    figures = AnswerFigures(len(tokens), seconds, len(tokens) - 1, seconds, rounds=len(tokens))
    return [Sample(tokens, figures)] * 2


@pytest.mark.parametrize(
    ("draft", "added_ms", "auto_s", "holds"),
    [
        ("good", None, 2.0, True),
        ("good", 20.0, 1.01, True),
        ("good", 20.0, 1.03, False),
        ("wrong", None, 1.04, True),
        ("stalls", 5.0, 1.06, False),
    ],
)
def test_speculation_may_cost_little_on_a_long_way_and_with_a_bad_draft(
    draft: str, added_ms: float | None, auto_s: float, holds: bool
) -> None:
    found = outcome(PROMPTS, {"off": samples(1.0), "auto": samples(auto_s)}, Condition(draft, added_ms))
    assert found["holds"] is holds
    assert found["all"]["compared"]["auto"]["request_speedup"] == pytest.approx(1 / auto_s, abs=1e-4)


def test_a_bad_draft_that_changes_a_text_does_not_hold() -> None:
    found = outcome(PROMPTS, {"off": samples(1.0), "auto": samples(0.5, (1, 2, 4))}, Condition("wrong", None))
    assert not found["holds"]


def test_one_condition_is_told_by_category_and_columns_without_values_are_left_out() -> None:
    about = {"draft": "good", "added_ms": None, "measured_ms": None, "deaths": 0}
    found = {**about, **outcome(PROMPTS, {"off": samples(2.0), "auto": samples(1.0)}, Condition("good", None))}
    shown = table(list(rows(found, with_categories=True)))
    assert [line.split()[0] for line in shown.splitlines()] == ["CATEGORY", "code", "qa", "mean", "all"]
    assert "OFF TOKENS/S" in shown and "DEATHS" not in shown and "ROUND TRIP" not in shown


def test_one_arm_alone_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": "?"}\n')
    assert bench(["latency", "--prompts", str(file), "--arm", "off"]) == 2
    assert bench(["latency", "--prompts", str(file), "--added-ms", "1,x"]) == 2


async def test_a_stack_without_draft_workers_is_measured_as_it_is() -> None:
    stack = Stack(StackConfig(drafts=0))
    processes = dict(stack.processes)
    await prepare(stack, Condition("good", None))
    assert stack.processes == processes


def test_without_draft_workers_none_can_be_changed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": "?"}\n')
    assert bench(["latency", "--prompts", str(file), "--drafts", "0", "--draft", "wrong"]) == 2
