"""A package is a room: few files, and a docstring that says what is in it and names the file to begin with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = sorted(
    room.parent
    for root in ("services/outrider", "controller/outrider_controller")
    for room in (_ROOT / root).rglob("__init__.py")
    if "rpc/v1" not in str(room)
)
_MAX_FILES, _MAX_SHORT_FILES, _SHORT_LINES = 14, 70, 60
_BEGIN = re.compile(r"Begin\s+with\s+`(\w+)(?:\.py|/)?`")


def _files(room: Path) -> list[Path]:
    return [file for file in room.glob("*.py") if file.name != "__init__.py"]


@pytest.mark.parametrize("room", _ROOMS, ids=lambda room: str(room.relative_to(_ROOT)))
def test_a_room_has_few_files_and_says_where_to_begin(room: Path) -> None:
    assert len(_files(room)) <= _MAX_FILES
    said = _BEGIN.search(ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "")
    assert said is not None, "Begin with `…`"
    assert (room / f"{said[1]}.py").exists() or (room / said[1]).is_dir(), said[0]


def test_few_files_are_so_short_that_they_might_be_part_of_another() -> None:
    assert len(_ROOMS) > 50
    short = [file for room in _ROOMS for file in _files(room) if len(file.read_text().splitlines()) <= _SHORT_LINES]
    assert len(short) <= _MAX_SHORT_FILES
