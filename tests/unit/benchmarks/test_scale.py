"""python -m benchmarks scale: which prompts, and when it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from outrider.sim.pair import Answered
from outrider_controller.cli.exits import CommandError

from benchmarks.__main__ import run as bench
from benchmarks.scenarios.scale import Compared, Difference, run, summary
from benchmarks.support.prompts import Prompt
from benchmarks.support.texts import assembled

LONG = "one two three four five six seven eight nine ten"


class Scripted:
    """Answers each prompt with its tokens; with speculation, differently for the prompts in `wrong`."""

    def __init__(self, wrong: Sequence[int] = ()) -> None:
        self.wrong = wrong
        self.salts: list[bytes] = []

    def answer(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, speculate: bool, salt: bytes = b""
    ) -> list[Answered]:
        self.salts.append(salt)
        shift = [int(speculate and prompt[0] in self.wrong) for prompt in prompts]
        counts = {"num_steps": 1, "num_drafted": 2, "num_verified": 2, "num_accepted": 1}
        return [Answered([p[0], p[0] + s], **counts, finished=True) for p, s in zip(prompts, shift, strict=True)]


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


def test_differences_of_all_parts_are_kept_with_both_answers() -> None:
    pair = Scripted(wrong=[3, 299])
    compared = run(pair, [[number] for number in range(300)], 2)
    assert compared.different == [Difference(3, [3, 3], [3, 4]), Difference(299, [299, 299], [299, 300])]
    assert (compared.count, compared.tokens, compared.steps, compared.verified, compared.accepted) == (
        300,
        600,
        300,
        600,
        300,
    )
    plain, speculative = pair.salts[:2]
    assert plain != speculative, "neither finds the other's prompts in the prefix cache"


def test_it_holds_only_where_all_are_equal() -> None:
    assert summary(Compared(10_000))["holds"]
    assert not summary(Compared(10_000, different=[Difference(3, [1], [2])]))["holds"]


def test_the_whole_command_on_a_tiny_pair(tiny: Path, tmp_path: Path) -> None:
    file, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    lines = [
        {"id": str(n), "prompt": f"count from {n} to {n + 9} in steps of one and then back again"} for n in range(6)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["scale", "--prompts", str(file), "-n", "8", "--max-tokens", "12"]
    models = ["--target-model", str(tiny), "--draft-model", str(tiny), "--json", str(report)]
    assert bench([*arguments, *models]) == 0
    found = json.loads(report.read_text())
    assert (found["prompts"], found["equal"], found["num_prompts"]) == (8, 8, 8)
    assert 0.3 < found["acceptance"] <= 1
