"""The commands that the pages show, one by one. `python -m tests.documented` counts them.

A comment before a block of commands says which of them tests do not run, and why; without brackets: none of the block.

    <!-- not run by tests: it needs a GPU -->
    <!-- not run by tests (make, outrider distill): hours -->
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
_BLOCK = re.compile(
    r"(?:<!-- not run by tests(?: \(([^)]*)\))?: (?P<reason>[^\n]+?) -->\s*)?^(?P<indent> *)```(?P<kind>sh|python)\n"
    r"(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_ALONE = re.compile(
    r"outrider (compare|plan|distill|config|create certificates)\b|source |shuf |head |tail |openssl |\(umask "
)
_IN_SECONDS = ("openssl ", "(umask ", "outrider plan --acceptance", "outrider create certificates", "outrider config ")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str
    kind: str
    """sh or python; a block of Python is one command."""
    reason: str
    """Why tests do not run it."""

    @property
    def quick(self) -> bool:
        return not self.reason and self.text.startswith(_IN_SECONDS)

    @property
    def asks_a_stack(self) -> bool:
        if self.kind == "python":
            return "127.0.0.1" in self.text
        return not _ALONE.match(self.text)


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text()
    name = str(page.relative_to(ROOT))
    for block in _BLOCK.finditer(text):
        line, reason, kind = text[: block.start("text")].count("\n") + 1, block["reason"] or "", block["kind"]
        only = tuple(part.strip() for part in (block[1] or "").split(",")) if block[1] else ("",)
        dedented = re.sub(rf"^{block['indent']}", "", block["text"], flags=re.MULTILINE)
        for number, each in [(0, dedented)] if kind == "python" else _split(dedented):
            said = reason if each.startswith(only) else ""
            yield Command(name, line + number, each, kind, said)


def _split(block: str) -> Iterator[tuple[int, str]]:
    """(line, command): a command goes on until the shell has read it whole."""
    begun, start = "", 0
    for number, line in enumerate(block.splitlines()):
        if not begun and (not line.strip() or line.startswith("#")):
            continue
        start = start if begun else number
        begun += line + "\n"
        if (
            not line.endswith("\\")
            and not subprocess.run(["bash", "-n"], input=begun.encode(), capture_output=True).returncode
        ):
            yield start, begun.strip()
            begun = ""
    assert not begun, begun


def main() -> None:
    found = [command for page in PAGES for command in commands(page)]
    for command in found:
        if command.reason:
            print(f"{command.page}:{command.line}: {command.text.splitlines()[0]}  [{command.reason}]")
    marked = sum(bool(command.reason) for command in found)
    print(f"{len(found)} commands: {len(found) - marked} run, {marked} marked with a reason")


if __name__ == "__main__":
    main()
