"""python -m tests.nightly [PART ...]: what there is only time for at night. tests/NIGHTLY.md has the last results.

A part that is not asked for keeps its line there. Exit code 0 only if all that ran passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.hardware import hardware

from benchmarks.gpu_day import Outcome, Step, run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests/NIGHTLY.md"
TIERS = ("unit", "integration", "simulation", "e2e", "soak")
PARTS = {
    **{tier: f"python -m pytest -m 'slow and not gpu' -n 2 --dist loadfile tests/{tier}" for tier in TIERS},
    "vllm": "make test-vllm",
    "schedules": "python -m tests.simulation --schedules 5000 --seed $(date +%Y%m%d)",
    "pairs": "python -m tests.soak kill-pairs",
    "rolling": "python -m tests.soak rolling",
    "arm": "make test-aarch64",
    "chart": "make chart-check",
}
"""Each with its command, as one types it."""
_HOURS = 6.0
"""For one part, at most."""
_HEAD = """# Each night

`python -m tests.nightly` runs these parts and writes this page. With the name of a part it runs that alone.

| part | command | last result | took | when | commit | machine |
|---|---|---|---|---|---|---|
"""
_NEVER = ("not run yet", *[""] * 4)
_COUNTS = re.compile(r"(?:\d\.\d+: )?\d+ (?:failed|passed)[\w,;:. ]*(?= in )")
"""Of pytest, or of several releases one after the other."""

Rows = Mapping[str, tuple[str, ...]]
"""Part → what the page has of its last run."""


def rows(page: str) -> Rows:
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines()]
    return {line[0]: tuple(line[2:]) for line in cells if line[0] in PARTS}


def written(known: Rows) -> str:
    lines = [f"| {part} | `{PARTS[part]}` | {' | '.join(known.get(part, _NEVER))} |\n" for part in PARTS]
    return _HEAD + "".join(lines)


def row(outcome: Outcome, commit: str) -> tuple[str, ...]:
    counts = _COUNTS.findall(outcome.output)
    result = f"{outcome.verdict}{f' ({counts[-1]})' if counts else ''}"
    machine = hardware()
    return result, f"{outcome.seconds:.0f} s", machine["at"], commit, f"{machine['cpu']}, {machine['cores']} cores"


def _step(part: str) -> Step:
    command = PARTS[part].replace("python ", f"{sys.executable} ", 1)
    return Step(part, lambda seconds: ["bash", "-c", f"cd {ROOT} && {command}"], 1.0)


def _state() -> str:
    """The commit, and whether anything else than the page has changed since."""
    commit = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    others = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!tests/NIGHTLY.md"]
    return commit if subprocess.run(others, cwd=ROOT).returncode == 0 else f"{commit}-dirty"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parts = parser.parse_args(arguments).parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    commit = _state()
    passed = True
    for part in parts:
        [outcome] = run([_step(part)], _HOURS, lambda line: print(line, flush=True))
        if outcome.verdict != "passed":
            passed = False
            print(outcome.output)
        # After each: what a night has done is kept if it is cut short.
        known = rows(PAGE.read_text()) if PAGE.exists() else {}
        PAGE.write_text(written({**known, part: row(outcome, commit)}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
