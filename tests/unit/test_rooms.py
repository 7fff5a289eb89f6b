"""A package is a room, and its docstring names the file to begin with. The import contracts say which knows which."""

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
_BEGIN = re.compile(r"Begin\s+with\s+`(\w+)(?:\.py|/)?`")


@pytest.mark.parametrize("room", _ROOMS, ids=lambda room: str(room.relative_to(_ROOT)))
def test_a_room_says_where_to_begin(room: Path) -> None:
    said = _BEGIN.search(ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "")
    assert said is not None, "Begin with `…`"
    assert (room / f"{said[1]}.py").exists() or (room / said[1]).is_dir(), said[0]
