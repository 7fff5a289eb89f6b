"""The files by which docs/architecture.md has a reader follow a request: few, short, and joined as it says."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ITEM = re.compile(r"^(\d)\. \*\*.*?\]\(\.\./(.*?)\)", re.MULTILINE | re.DOTALL)
MESSAGES = re.compile(r"A message between processes joins ([^.]*)\.")
MAX_FILES = 8
MAX_LINES = 2500


def followed() -> list[str]:
    """The first file of each numbered step."""
    section = PAGE.split("## One request")[1].split("\n## ")[0]
    steps = ITEM.findall(section)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    return [path for _, path in steps]


def module(path: str) -> str:
    return path.split("/", 1)[1].removesuffix(".py").replace("/", ".")


def test_a_request_is_followed_through_few_and_short_files() -> None:
    files = [ROOT / path for path in followed()]
    assert 5 <= len(files) <= MAX_FILES
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES


def test_each_file_imports_the_next_unless_a_message_takes_the_request_there() -> None:
    graph = grimp.build_graph("outrider", "outrider_controller")
    declared = MESSAGES.search(PAGE)
    assert declared is not None
    by_message = {(int(a), int(b)) for a, b in re.findall(r"(\d) to (\d)", declared.group(1))}
    for number, (here, there) in enumerate(pairwise(map(module, followed())), 1):
        direct = graph.find_modules_directly_imported_by(here)
        reached = direct.union(*map(graph.find_modules_directly_imported_by, direct))
        if (number, number + 1) in by_message:
            assert there not in reached, f"{here} imports {there}: no message is needed"
            assert here.split(".")[:2] != there.split(".")[:2], "within one process"
        else:
            assert there in reached, f"{here} does not lead to {there}"
