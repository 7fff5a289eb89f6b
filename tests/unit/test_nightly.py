"""What runs each night, and the page of its last results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_day import Outcome
from tests import nightly
from tests.affected import ELSEWHERE, ROOT, _has_slow_tests, _name


def test_every_slow_test_is_in_a_part() -> None:
    slow = [_name(file) for file in (ROOT / "tests").rglob("test_*.py") if _has_slow_tests(file)]
    folders = (*(f"tests/{tier}/" for tier in nightly.TIERS), ELSEWHERE)
    assert slow and [file for file in slow if not file.startswith(folders)] == []


def test_a_part_changes_its_own_line_alone_and_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "NIGHTLY.md")
    monkeypatch.setattr(nightly, "PARTS", {"one": "echo 3 passed, 1 skipped in 2 s", "two": "exit 3"})
    assert nightly.main(["one"]) == 0
    assert nightly.main(["two"]) == 1
    found = nightly.rows((tmp_path / "NIGHTLY.md").read_text())
    assert found["one"][0] == "passed (3 passed, 1 skipped)" and found["two"][0] == "failed: exit code 3"
    with pytest.raises(SystemExit):
        nightly.main(["three"])


def test_the_page_has_every_part_in_its_order() -> None:
    page = nightly.PAGE.read_text()
    assert nightly.written(nightly.rows(page)) == page, "python -m tests.nightly writes it"
    for counts in ("1 failed, 2 passed", "0.32: 1 failed, 2 passed; 0.33: 3 passed, 1 skipped"):
        outcome = Outcome("x", "passed", 1.0, f"a line\n{counts} in 3 s")
        assert nightly.row(outcome, "c")[0] == f"passed ({counts})"
