"""--watch tells the rows that change, and only those."""

from __future__ import annotations

import json

import pytest
import yaml
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.watching import Row, changed_lines, repeated

SHOWN = ("id", "status", "running", "age_ms")


def row(name: str, status: str = "ready", running: int = 0, age_ms: int = 0) -> Row:
    return {"id": name, "status": status, "running": running, "age_ms": age_ms}


def test_rows_that_are_new_changed_or_gone_are_told_and_an_age_is_no_change() -> None:
    before = [row("a"), row("b"), row("c")]
    now = [row("a", age_ms=900), row("b", "cordoned", 2), row("d", running=1)]
    assert [line.split() for line in changed_lines(before, now, SHOWN, "table")] == [
        ["b", "cordoned", "2", "0"],
        ["d", "ready", "1", "0"],
        ["c", "gone", "0", "0"],
    ]
    assert changed_lines(before, now, SHOWN, "name") == ["b", "d"]
    assert changed_lines(before, before, SHOWN, "table") == []


def test_rows_with_one_name_are_told_apart_by_their_other_columns() -> None:
    before = [row("a", "hour 1", 1), row("a", "hour 2", 2)]
    now = [row("a", "hour 1", 1), row("a", "hour 2", 3)]
    (line,) = changed_lines(before, now, SHOWN, "table", key=("id", "status"))
    assert "hour 2" in line


def test_documents_say_on_a_line_what_changed_and_what_is_gone() -> None:
    before, now = [row("a"), row("b"), row("c")], [{**row("a"), "age_ms": 9}, row("c", running=1)]
    (line,) = changed_lines(before, now, ("id",), "json", "workers")
    assert json.loads(line) == {"schema": "outrider/workers/v1", "workers": [now[1], row("b", "gone")]}
    (text,) = changed_lines(before, now, ("id",), "yaml", "workers")
    assert text.startswith("---\n") and yaml.safe_load(text) == json.loads(line)
    assert changed_lines(before, before, ("id",), "json", "workers") == []


def test_a_watch_goes_on_while_nobody_answers_says_so_once_and_ends_at_a_refusal() -> None:
    away, denied = CommandError("away", ExitCode.UNAVAILABLE), CommandError("no", ExitCode.DENIED)
    answers: list[int | CommandError] = [1, away, away, 2, away, denied]
    reports: list[str] = []

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    found = []
    with pytest.raises(CommandError, match="no"):
        for answer in repeated(read, 0, reports.append):
            found.append(answer)
    assert (found, reports) == ([1, 2], ["away", "away"])


def test_a_watch_that_never_began_fails_at_once() -> None:
    def read() -> None:
        raise CommandError("away", ExitCode.UNAVAILABLE)

    with pytest.raises(CommandError):
        next(repeated(read, 0))
