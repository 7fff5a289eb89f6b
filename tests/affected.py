"""python -m tests.affected --within SECONDS: of the slow tests, those that the present change touches.

A file of tests is touched when it has changed, or a helper beside it, or something that they import, however
indirectly. What is nearest to the change comes first. What there is no time for is named; it fails nothing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("services", "controller", ".")
PACKAGES = ("outrider", "outrider_controller", "benchmarks", "loadtest")
WHOLE_STACK = ("tests/e2e", "tests/soak")
"""They start every process by its command line, which no import shows."""
ELSEWHERE = "tests/vllm/"
"""Run by another environment: see .ci/run."""
ALWAYS_SLOW = ("tests/soak/", ELSEWHERE)
"""What `make test` never runs, however fast a file of it is."""
MARKED = ("mark.slow", "slow_but_the_best(")
"""By which a file marks tests as slow."""
FOLDERS = {
    "deploy/k8s/": ("tests/unit/deploy", "tests/e2e/test_dashboards.py", "tests/e2e/test_alerts.py"),
    "deploy/images/": ("tests/unit/deploy",),
    "controller/outrider_controller/control/console/static/": ("tests/unit/controller/control/console/test_page.py",),
    "services/outrider/vllm/": (ELSEWHERE,),
}
"""Of what no import of a test shows: the tests that read it, or that vLLM loads it in."""
EVERYTHING = ("pyproject.toml", "Makefile", "tests/conftest.py", "tests/affected.py")
PYTEST = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder")


def changed_paths(root: Path = ROOT) -> list[str]:
    """Since the change left the main branch; on that branch, or without one, since the commit before.

    Of a single commit without a past everything is new.
    """
    for base in ("origin/HEAD", "origin/main", "main"):
        fork = _git(root, "merge-base", "HEAD", base)
        if fork and fork != _git(root, "rev-parse", "HEAD"):
            return _git(root, "diff", "--name-only", fork).splitlines()
    if _git(root, "rev-parse", "--verify", "--quiet", "HEAD~1"):
        return _git(root, "diff", "--name-only", "HEAD~1").splitlines()
    return _git(root, "ls-files").splitlines()


def _git(root: Path, *arguments: str) -> str:
    """Its output; nothing where it fails."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout.strip()


def touched(changed: Iterable[str]) -> list[str]:
    """Files of slow tests, nearest first."""
    changed = list(changed)
    files = sorted(filter(_has_slow_tests, (ROOT / "tests").rglob("test_*.py")), key=_tier)
    if any(path in EVERYTHING for path in changed):
        return list(map(_name, files))
    named = [tests for folder, tests in FOLDERS.items() if any(path.startswith(folder) for path in changed)]
    read = [file for file in files if _name(file).startswith(tuple(itertools.chain.from_iterable(named)))]
    modules = {module for path in changed if (module := _module(path))}
    reached = modules | {user for module in modules for user in _users(module)}
    near = [file for file in files if _own(file) & set(changed) or _is_tested_by(file, modules)]
    far = [file for file in files if _runs(file, reached) or reached & _imports(file) or _is_tested_by(file, reached)]
    return list(dict.fromkeys(map(_name, [*read, *near, *far])))


def _has_slow_tests(file: Path) -> bool:
    text = file.read_text()
    return _name(file).startswith(ALWAYS_SLOW) or any(each in text for each in MARKED)


def _tier(file: Path) -> tuple[int, Path]:
    tiers = ("unit", "integration", "simulation", "e2e", "soak", "gpu", "vllm")
    return tiers.index(_folder(file).split("/")[1]), file


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _folder(file: Path) -> str:
    return _name(file.parent)


def _own(file: Path) -> set[str]:
    """The file, and what lies beside it to help: conftest.py, fakes, a world to simulate."""
    return {_name(file), *(_name(other) for other in file.parent.glob("*.py") if not other.name.startswith("test_"))}


def _is_tested_by(file: Path, modules: Iterable[str]) -> bool:
    """Whether the file's folder has the name of a package that one of these is in."""
    parts = _folder(file).split("/")[2:]
    packages = [".".join((*parent, *parts)) for parent in ((), *((package,) for package in PACKAGES)) if parts]
    return any(module == package or module.startswith(f"{package}.") for module in modules for package in packages)


def _runs(file: Path, modules: Iterable[str]) -> bool:
    return _folder(file) in WHOLE_STACK and any(not module.startswith("benchmarks") for module in modules)


@functools.cache
def _imports(file: Path) -> set[str]:
    """What the file and its helpers import."""
    return {name for own in _own(file) for name in _imported(ast.parse((ROOT / own).read_text()))}


def _module(path: str) -> str | None:
    """The module that a file is, or whose package it belongs to."""
    if path.startswith("proto/"):
        return "outrider.rpc.v1"
    for source in SOURCES:
        pure = PurePosixPath(path)
        if pure.is_relative_to(source) and (parts := pure.relative_to(source).parts)[0] in PACKAGES:
            parts = parts if pure.suffix == ".py" and pure.stem != "__init__" else parts[:-1]
            return ".".join(parts).removesuffix(".py")
    return None


def _users(module: str) -> set[str]:
    """Who imports it, or a package that it is in, directly or not."""
    graph = _graph()
    while module and module not in graph.modules:
        module = module.rpartition(".")[0]
    return graph.find_downstream_modules(module) if module else set()


@functools.cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class Within:
    """Ends the run when the time is over; then what has failed so far is what counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failed = False
        self.asked: set[str] = set()
        self.done: set[str] = set()

    def pytest_sessionstart(self) -> None:
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def _over(self, *_: Any) -> None:
        pytest.exit("the time for slow tests is over", returncode=1 if self.failed else 0)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.asked.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        if report.when == "teardown":
            self.done.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for nodeid in sorted(self.asked - self.done):
            terminalreporter.write_line(f"left out for want of time: {nodeid}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=float, default=300, metavar="SECONDS", help="Time for all of them.")
    parser.add_argument("--list", action="store_true", help="Only say which files are touched.")
    options = parser.parse_args()
    files = touched(changed_paths())
    print("slow tests touched by this change:", *files or ["none"], flush=True)
    if options.list or not files:
        return 0
    if options.within <= 0:
        print("no time is left for them")
        return 0
    here = [file for file in files if not file.startswith(ELSEWHERE)]
    if not here:
        return 0
    code = pytest.main([*PYTEST, "-m", "slow", *here], plugins=[Within(options.within)])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
