"""The files by which docs/architecture.md has a reader follow a request: few, short, and joined as it says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LINK = re.compile(r"\]\(\.\./(.*?\.py)\)")
MESSAGES = re.compile(r"A message between processes joins ([^.]*)\.")
MAX_FILES = 8
MAX_LINES = 2500


@dataclass(frozen=True)
class Step:
    """One numbered step: modules."""

    files: list[str]
    """Those to read, outside of brackets."""
    details: list[str]


def section() -> str:
    return PAGE.split("## One request")[1].split("\nA message between")[0]


def steps() -> list[Step]:
    numbered = re.split(r"^(\d)\. ", section(), flags=re.MULTILINE)[1:]
    assert [int(number) for number in numbered[::2]] == list(range(1, len(numbered) // 2 + 1))
    halves = [re.split(r"(?<=\s)\((?=\[)", text, maxsplit=1) for text in numbered[1::2]]
    return [Step(modules(files), modules("".join(details))) for files, *details in halves]


def modules(text: str) -> list[str]:
    return [path.split("/", 1)[1].removesuffix(".py").replace("/", ".") for path in LINK.findall(text)]


def source(module: str) -> Path:
    root = "services" if module.startswith("outrider.") else "controller"
    return (ROOT / root / module.replace(".", "/")).with_suffix(".py")


def imported_by(module: str) -> set[str]:
    """The modules that define what it imports, also where a package re-exports that."""
    return {found for name, imported in imports(source(module)) for found in defined_in(name, imported)}


@cache
def imports(file: Path) -> list[tuple[str, str]]:
    """(module or package, name) of each `from … import …`."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(node.module or "", alias.name) for node in nodes for alias in node.names]


def defined_in(name: str, imported: str) -> list[str]:
    if source(f"{name}.{imported}").exists():
        return [f"{name}.{imported}"]
    package = source(name).with_suffix("") / "__init__.py"
    return [each for each, reexported in imports(package) if reexported == imported] if package.exists() else [name]


def by_message() -> set[tuple[int, int]]:
    declared = MESSAGES.search(PAGE)
    assert declared is not None
    return {(int(a), int(b)) for a, b in re.findall(r"(\d) to (\d)", declared.group(1))}


def test_a_request_is_followed_through_few_and_short_files() -> None:
    files = [source(file) for step in steps() for file in step.files]
    assert all(step.files for step in steps())
    assert 5 <= len(files) <= MAX_FILES
    assert sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES


def test_each_file_is_imported_by_one_before_it_unless_a_message_takes_the_request_there() -> None:
    """By way of no file that the page leaves out: whatever does a step would be missed here."""
    earlier: list[str] = []
    known = {file for step in steps() for file in (*step.files, *step.details)}
    for number, step in enumerate(steps(), 1):
        for file in step.files:
            direct = set().union(*map(imported_by, earlier)) if earlier else set()
            reached = direct.union(*map(imported_by, direct & known))
            if (number - 1, number) in by_message() and file == step.files[0]:
                assert file not in imported_by(earlier[-1]), f"{earlier[-1]} imports {file}: no message is needed"
                assert earlier[-1].split(".")[:2] != file.split(".")[:2], "within one process"
            elif earlier:
                assert file in reached, f"nothing before it leads to {file}"
            earlier.append(file)


def test_each_detail_is_imported_by_a_file_of_its_step_or_imports_one() -> None:
    for step in steps():
        named = {*step.files, *step.details}
        for detail in step.details:
            others = named - {detail}
            joined = imported_by(detail) & others or any(detail in imported_by(other) for other in others)
            assert joined, f"{detail} has nothing to do with {step.files}"


def test_how_much_a_sequence_speculates_has_one_type_from_the_routers_decision_to_the_drafts() -> None:
    files = [file for package in ("services", "controller") for file in (ROOT / package).rglob("*.py")]
    texts = [text for file in files if "max_own_draft_tokens" in (text := file.read_text())]
    nodes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert [each.name for each in nodes if "max_own_draft_tokens: int" in ast.unparse(each)] == ["Speculation"]
