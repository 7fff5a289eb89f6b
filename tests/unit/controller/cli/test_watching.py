"""--watch tells the rows that change, and only those."""

from __future__ import annotations

from outrider_controller.cli.app import run
from outrider_controller.cli.watching import Row, changed_lines

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


def test_documents_are_not_watched() -> None:
    assert run(["get", "workers", "--watch", "-o", "yaml", "--control", "127.0.0.1:1"]) == 2
