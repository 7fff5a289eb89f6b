"""The numbers by which the product decides lie in one file per process, each with its unit and its reason.

They are those of the rooms that decide: who may start, which worker, how much is drafted and verified. Another value
makes a decision better or worse. No such numbers are bounds on what is taken or kept (`MAX_…`, no fraction), times for
which a process waits for another or between two looks (by their names), and the facts below. What raises an alert is
its meaning, and stated in docs/operations.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_CONTROLLER, _SERVICES = _ROOT / "controller" / "outrider_controller", _ROOT / "services" / "outrider"
_DECIDE = (
    *(_CONTROLLER / room for room in ("autoscaler", "control/plan", "router", "whatif/stack.py")),
    *(_SERVICES / room for room in ("draft", "drafters", "drafting/heads/text.py", "drafting/buffer.py")),
    *(_SERVICES / room for room in ("target/step", "target/drafts", "target/requests", "worker/step_cost.py")),
    *(_SERVICES / room for room in ("gateway/tenants", "gateway/generation")),
)
_MAX_NUMBERS, _MAX_FILES = 30, 3
_BOUND = re.compile(r"_?MAX_\w+|_?MIN_\w*(BYTES|CHARS|RETRY_S)")
_WAIT = re.compile(r"_?(\w*_)?(TIMEOUT|EVERY|TICK|RETRY|RETRY_PLACE|REPORT|FRESH|FRESH_WITHOUT_KEY|LAST_KNOWN)_S")
_FACTS = {
    **dict.fromkeys(("_NEVER", "_UNKNOWN", "_STAND_IN"), "stands for no number"),
    **dict.fromkeys(("Z_80", "_UINT64_MAX", "_SALT_BYTES", "FRAME_BYTES"), "mathematics, or a format"),
    **dict.fromkeys(("_ROUNDING", "_ROUNDED_US"), "how exactly another process counts"),
    **dict.fromkeys(("DEFAULT_SHARE", "MAX_SHARE", "PROMOTE_ABOVE", "UNDO_BELOW"), "a rollout's terms"),
    **dict.fromkeys(("GIVE_UP_TOKENS", "_ERROR", "MIN_REPORTS"), "a rollout's terms"),
    **dict.fromkeys(("SIZE", "_PAGE"), "a term of a policy, or a page of a list"),
    **dict.fromkeys(("SAMPLED_TOP", "_CHECKED_TOKENS"), "how much is recorded or tried"),
    **dict.fromkeys(("_LOOSE", "_FAR"), "how tokenizers join texts"),
    "_SWITCH_INTERVAL_S": "of the Python interpreter",
    "_RESPONSE_BYTES": "how large a message is",
}


def _constants(file: Path) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for name, of in zip(target.elts, value.elts, strict=True) if several else [(target, value)]:
            if isinstance(name, ast.Name) and name.id.strip("_").isupper():
                yield name.id, of


def _is_number(value: ast.expr) -> bool:
    """Written out; not derived from another constant."""
    parts = ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator
    numbers = (type(node.value) in (int, float) for node in ast.walk(value) if isinstance(node, ast.Constant))
    return all(isinstance(node, parts) for node in ast.walk(value)) and all(numbers)


def _numbers(file: Path) -> list[tuple[str, ast.expr]]:
    return [(name, value) for name, value in _constants(file) if _is_number(value)]


def _decides(name: str, value: ast.expr) -> bool:
    fraction = any(isinstance(node, ast.Constant) and isinstance(node.value, float) for node in ast.walk(value))
    bounds = _BOUND.fullmatch(name) and (name.endswith("_S") or not fraction)
    return not (bounds or _WAIT.fullmatch(name) or name in _FACTS)


def _files() -> list[Path]:
    return sorted({file for place in _DECIDE for file in (place.rglob("*.py") if place.is_dir() else [place])})


def _tuning() -> list[Path]:
    return sorted(file for root in (_CONTROLLER, _SERVICES) for file in root.rglob("tuning.py"))


def test_numbers_that_decide_are_in_few_files() -> None:
    """The bars may only fall."""
    assert len(_tuning()) <= _MAX_FILES
    assert 10 < sum(len(_numbers(file)) for file in _tuning()) <= _MAX_NUMBERS


def test_no_number_that_decides_is_elsewhere() -> None:
    found = {file: [name for name, value in _numbers(file) if _decides(name, value)] for file in _files()}
    assert [(file, names) for file, names in found.items() if names and file not in _tuning()] == []


@pytest.mark.parametrize("file", _tuning(), ids=lambda file: file.parent.name)
def test_each_has_its_unit_or_reason(file: Path) -> None:
    lines = [
        (before, line) for before, line in pairwise(file.read_text().splitlines()) if re.match("[A-Z_, ]+ = ", line)
    ]
    assert len(lines) > 5
    assert [line for before, line in lines if "  # " not in line and not before.startswith("# ")] == []
