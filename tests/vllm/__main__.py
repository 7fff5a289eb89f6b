"""python -m tests.vllm [FILE ...] [-- ARGUMENTS OF PYTEST]: the tests here, with each release of vLLM.

In vLLM's environment; `make test-vllm`. Each file runs in a process of its own, for a process has one vLLM engine. One
that fails does not keep others from running. Prints of each file how many tests passed, failed and were skipped, and
its seconds; of each release their sums.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

from outrider.vllm.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
PATHS = ("", str(ROOT / "build/vllm-next/site"))
"""Where Python finds each release; the first is installed."""


def outcome(report: Path, status: int) -> Counter[str]:
    """Of the tests of one file. A process that has died leaves no report, or dies after it."""
    if not report.exists():
        return Counter(failed=1)
    found = Counter[str]()
    for suite in xml.parse(report).getroot().iter("testsuite"):
        failed, skipped = int(suite.attrib["failures"]) + int(suite.attrib["errors"]), int(suite.attrib["skipped"])
        found.update(failed=failed, skipped=skipped, passed=int(suite.attrib["tests"]) - failed - skipped)
    if status and not found["failed"]:
        found.update(failed=1)
    return found


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("failed", "passed", "skipped") if counts[name])


def run(file: str, path: str, arguments: list[str]) -> Counter[str]:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", file, f"--junitxml={report}", *arguments]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
        return outcome(report, ended.returncode)


def main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    files = words[:at] or sorted(str(file.relative_to(ROOT)) for file in Path(__file__).parent.glob("test_*.py"))
    sums, began_s = {release: Counter[str]() for release in SUPPORTED}, time.monotonic()
    for release, path in zip(SUPPORTED, PATHS, strict=True):
        for file in files:
            file_s = time.monotonic()
            counts = run(file, path, words[at + 1 :])
            sums[release].update(counts)
            print(f"{release} {file}: {said(counts)}, {time.monotonic() - file_s:.0f} s", flush=True)
    each = "; ".join(f"{release}: {said(counts)}" for release, counts in sums.items())
    print(f"{each} in {time.monotonic() - began_s:.0f} s")
    return 1 if any(counts["failed"] for counts in sums.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
