"""The code names things in the field's terms (docs/glossary.md): words that it once had for them do not come back."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_ROOTS = ("services", "controller", "benchmarks", "tests/soak", "tests/simulation")
_FORMER = {
    *("Course", "Openings", "Legs", "Sums", "Worth", "Standing", "Pace", "Ahead", "Preparing", "_Way", "Lengths"),
    *("Beside", "Sibling", "SiblingKV", "OfferedDraft", "SentDraft", "Drafted"),
    *("Notices", "Persistence", "Meter", "Metered", "RoundLog", "Tally"),
    *("Patience", "Sighting", "MatcherAside", "Ran"),
    "Judged",
    *("Pairing", "PairingEvidence"),
    *("Belief", "Beliefs"),
}
_FORMER_WORDS = {
    *("course", "legs", "worth", "standing", "alternatives", "heard", "spoke", "apart", "judge"),
    *("conclude", "tally", "metering", "margins", "parting", "attach"),
    *("aside", "masks_aside", "compile_aside", "blamed", "sighting", "seen_then"),
    *("beside", "beside_s", "way_s", "hope", "hoped", "favourite", "favourites"),
    "speaks",
    *("told", "told_len"),
    *("judged", "unjudged"),
    *("insists", "insistent", "clients_insist", "clients_may_not_insist"),
    *("resting", "rested", "rests", "may_rest", "rest_tokens"),
    *("pairing", "pairings", "pairing_problem"),
    *("belief", "beliefs", "believed"),
}
"""With an underscore before them or without."""
_SHARED = {*("Comparison", "Fleet", "Question", "Sampled", "Scheduler", "Text", "Times")}
"""Public classes in two modules of the product; no others are."""
_FORMER_CONSTANT = re.compile(r"_?(MOST|LEAST|FEW)(EST)?_[A-Z_]+")


def _names(source: str) -> Iterator[str]:
    """Of classes and functions, their arguments, and what is bound to a variable or an attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _is_former(name: str) -> bool:
    return name in _FORMER or name.removeprefix("_") in _FORMER_WORDS or bool(_FORMER_CONSTANT.fullmatch(name))


def test_no_former_name_is_left() -> None:
    files = [file for root in _ROOTS for file in (_ROOT / root).rglob("*.py") if "_pb2" not in file.name]
    former = {str(file.relative_to(_ROOT)): set(filter(_is_former, _names(file.read_text()))) for file in files}
    assert len(files) > 400
    assert {file: found for file, found in former.items() if found} == {}


def test_no_message_has_a_former_name() -> None:
    files = sorted((_ROOT / "proto").rglob("*.proto"))
    # Comments apart: those of a field that is gone may say what it was.
    found = {file.name: [line.split("//")[0] for line in file.read_text().splitlines()] for file in files}
    former = {name: set(filter(_is_former, re.findall(r"\w+", " ".join(code)))) for name, code in found.items()}
    assert files and {name: words for name, words in former.items() if words} == {}


def test_a_public_class_has_its_name_for_itself() -> None:
    files = [file for root in _ROOTS[:2] for file in (_ROOT / root).rglob("*.py") if "_pb2" not in file.name]
    classes = [name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)]
    shared = {name for name, times in Counter(classes).items() if times > 1 and not name.startswith("_")}
    assert len(classes) > 500 and shared == _SHARED
