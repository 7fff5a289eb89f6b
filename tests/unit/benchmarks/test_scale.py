"""python -m benchmarks scale: which prompts, what is kept between runs, and when it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from outrider.sim.pair import Answered
from outrider_controller.cli.exits import CommandError

from benchmarks.__main__ import run as bench
from benchmarks.scenarios.scale import Checkpoint, Difference, Part, answers_of, run, summary
from benchmarks.support.near_ties import Margin
from benchmarks.support.prompts import Prompt
from benchmarks.support.texts import assembled

LONG = "one two three four five six seven eight nine ten"


class Scripted:
    """Answers each prompt with its tokens; with speculation, differently for the prompts in `wrong`."""

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        self.wrong = wrong
        self.asked = 0
        self.salts: list[bytes] = []

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, speculate: bool, salt: bytes = b""
    ) -> list[Answered]:
        self.asked += len(prompts)
        self.salts.append(salt)
        shift = [int(speculate and prompt[0] in self.wrong) for prompt in prompts]
        counts = {"num_steps": 1, "num_drafted": 2, "num_verified": 2, "num_accepted": 1}
        return [Answered([p[0], p[0] + s], **counts, finished=True) for p, s in zip(prompts, shift, strict=True)]


def prompts(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def test_beginnings_are_prompts_of_their_own_and_all_are_distinct() -> None:
    given = [Prompt("a", "qa", LONG), Prompt("b", "qa", LONG), Prompt("c", "qa", "short")]
    made = assembled(given, 3)
    assert sorted(p.id for p in made) == ["a", "a/8", "c"]
    assert {p.text for p in made} == {LONG, "short", "one two three four five six seven eight"}
    with pytest.raises(CommandError, match="make 3 distinct ones, not 4"):
        assembled(given, 4)


def test_prompts_come_in_the_same_random_order_every_time() -> None:
    given = [Prompt(str(number), "qa", f"question {number}") for number in range(50)]
    made = assembled(given, 50)
    assert made == assembled(given, 50)
    assert made != given


def test_a_difference_is_kept_with_both_answers() -> None:
    [part] = run(answers_of(Scripted(wrong=[3])), prompts(5), 2, Checkpoint(None, {}))
    assert part.different == [Difference(3, [3, 3], [3, 4])]
    assert (part.count, part.tokens, part.steps, part.verified, part.accepted) == (5, 10, 5, 10, 5)


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    file, asked = tmp_path / "checkpoint", {"dtype": "float32"}
    run(answers_of(Scripted(wrong=[2])), prompts(300), 2, Checkpoint(file, asked))
    again = Scripted()
    parts = run(answers_of(again), prompts(320), 2, Checkpoint(file, asked))
    assert again.asked == 2 * 20
    assert [part.start for part in parts] == [0, 256, 300]
    assert summary(parts, [Margin("a | b", 0.1, "0, 1")], "bfloat16")["prompts"] == 320
    assert parts[0].different == [Difference(2, [2, 2], [2, 3])]


def test_what_is_missing_between_parts_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    Checkpoint(file, {}).read()
    for start, count in ((256, 256), (0, 100)):
        Checkpoint(file, {}).add(Part(start, count))
    again = Scripted()
    parts = run(answers_of(again), prompts(600), 2, Checkpoint(file, {}))
    assert [(part.start, part.count) for part in parts] == [(0, 100), (100, 156), (256, 256), (512, 88)]
    assert again.asked == 2 * (156 + 88)


@pytest.mark.parametrize("shared", [True, False])
def test_a_prompt_is_found_again_only_where_that_is_wanted(shared: bool) -> None:
    pair = Scripted()
    run(answers_of(pair, shared), prompts(3), 2, Checkpoint(None, {}))
    plain, speculative = pair.salts
    assert (plain == speculative) is shared


def test_a_checkpoint_of_something_else_is_refused_by_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    run(answers_of(Scripted()), prompts(3), 2, Checkpoint(file, {"dtype": "float32", "target": "x"}))
    with pytest.raises(CommandError, match="another dtype"):
        run(answers_of(Scripted()), prompts(3), 2, Checkpoint(file, {"dtype": "bfloat16", "target": "x"}))
    file.write_text("nonsense\n")
    with pytest.raises(CommandError, match="not a checkpoint"):
        run(answers_of(Scripted()), prompts(3), 2, Checkpoint(file, {}))


@pytest.mark.parametrize(
    ("dtype", "different", "gap", "holds"),
    [
        ("float32", 0, 0.0, True),
        ("float32", 3, 0.01, True),
        ("float32", 4, 0.01, False),
        ("bfloat16", 4, 0.25, True),
        ("bfloat16", 1, 0.26, False),
    ],
)
def test_float32_holds_by_its_share_and_bfloat16_by_its_ties(
    dtype: str, different: int, gap: float, holds: bool
) -> None:
    part = Part(0, 10_000, different=[Difference(n, [1], [2]) for n in range(different)])
    assert summary([part], [Margin("a | b", gap, "0, 1")] * different, dtype)["holds"] is holds


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_whole_command_on_a_tiny_pair(tiny: Path, tmp_path: Path, processes: int) -> None:
    file, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    lines = [
        {"id": str(n), "prompt": f"count from {n} to {n + 9} in steps of one and then back again"} for n in range(6)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["scale", "--prompts", str(file), "-n", "10", "--limit", "8", "--max-tokens", "12"]
    models = ["--target-model", str(tiny), "--draft-model", str(tiny), "--json", str(report)]
    assert bench([*arguments, *models, "--processes", str(processes)]) == 0
    found = json.loads(report.read_text())
    assert (found["prompts"], found["equal"], found["num_prompts"]) == (8, 8, 10)
    assert 0.3 < found["acceptance"] <= 1
