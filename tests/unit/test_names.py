"""The code names things in the field's terms (docs/glossary.md): words that it once had for them do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_FORMER = {
    *("Course", "Openings", "Legs", "Sums", "Worth", "Standing", "Pace", "Ahead", "Preparing", "_Way", "Lengths"),
    *("Notices", "Persistence", "Meter", "Metered", "RoundLog", "Tally", "metering", "conclude", "_told"),
}
_FORMER_CONSTANT = re.compile(r"_?(MOST|LEAST|FEW)(EST)?_[A-Z_]+")


def _defined(source: str) -> set[str]:
    """Names of classes and functions, and of what is bound."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_no_former_name_is_left() -> None:
    files = [file for root in ("services", "controller") for file in (_ROOT / root).rglob("*.py")]
    names = {str(file): _defined(file.read_text()) for file in files if "_pb2" not in file.name}
    former = {
        file: {n for n in found if n in _FORMER or _FORMER_CONSTANT.fullmatch(n)} for file, found in names.items()
    }
    assert len(names) > 200
    assert {file: found for file, found in former.items() if found} == {}
