"""A test that hangs or dies fails alone: the others run, in its file and beside it. Tests that wait run beside others
that compute."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.running import Scheduling

_ROOT = Path(__file__).parents[2]
_HANGING = {
    "in_its_body": "def test_hangs(): time.sleep(60)",
    "in_asyncio": "def test_hangs(): asyncio.run(asyncio.sleep(60))",
    "in_the_fixture_before": "@pytest.fixture\ndef slow(): time.sleep(60)\ndef test_hangs(slow): pass",
    "in_the_fixture_after": "@pytest.fixture\ndef slow():\n  yield\n  time.sleep(60)\ndef test_hangs(slow): pass",
    "swallowing_the_first_signal": (
        "def test_hangs():\n  try: time.sleep(60)\n  except BaseException: pass\n  time.sleep(60)"
    ),
    "in_c_where_no_signal_is_heard": "def test_hangs(): ctypes.PyDLL(None).sleep(60)",
    "by_ending_its_process": "def test_hangs(): os._exit(3)",
}
# What pytest does between two phases takes longer than the limit: no fault of the test.
_SLOW_RUNNER = """
import os, time
from tests import running
running._AGAIN_S = 0.2
def pytest_runtest_logreport(report):
    if "test_hangs_in_its_body.py::test_before" in report.nodeid and "PYTEST_XDIST_WORKER" in os.environ:
        time.sleep(0.6)
"""


def _run(directory: Path) -> str:
    options = ("-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "-p", "tests.running", "-rA")
    start = [sys.executable, "-m", "pytest", *options, str(directory)]
    return subprocess.run(start, cwd=_ROOT, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_only_the_test_that_hangs_fails(tmp_path: Path) -> None:
    for how, hanging in _HANGING.items():
        before, after = "def test_before(): pass", "def test_after(): pass\ndef test_last(): pass"
        text = f"import asyncio, ctypes, os, time, pytest\n{before}\n{hanging}\n{after}\n"
        (tmp_path / f"test_hangs_{how}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(_SLOW_RUNNER)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 0.5")
    said = _run(tmp_path)
    passed = Counter(re.findall(r"^PASSED \S*::(\w+)", said, re.MULTILINE))
    failed = re.findall(r"^(?:FAILED|ERROR) \S*test_hangs_(\w+)\.py::test_hangs", said, re.MULTILINE)
    assert sorted(failed) == sorted(_HANGING), said
    del passed["test_hangs"]  # one hangs after it has passed
    assert passed == dict.fromkeys(("test_before", "test_after", "test_last"), len(_HANGING)), said


class Worker:
    """A worker of xdist, which notes what it is given."""

    shutting_down, gateway = False, SimpleNamespace(id="")

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None: ...


def scheduled(tests: list[str]) -> tuple[Scheduling, tuple[Worker, Worker]]:
    config = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=SimpleNamespace(loadscopereorder=False))
    scheduling, workers = Scheduling(config), (Worker(), Worker())
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    return scheduling, workers


def test_what_a_lost_worker_had_done_is_not_queued_again() -> None:
    tests = [f"tests/unit/{file}.py::test_{n}" for file in "abcdef" for n in range(3)]
    scheduling, workers = scheduled(tests)
    lost = workers[0]
    done = lost.given[:3]
    for index in done:
        scheduling.mark_test_complete(lost, index)
    crashed, following = (tests[index] for index in lost.given[3:5])
    assert scheduling.remove_node(lost) == crashed
    queued = {test: done for unit in scheduling.workqueue.values() for test, done in unit.items()}
    assert queued[crashed] and not queued[following]
    assert not queued.keys() & {tests[index] for index in done}


def test_unit_tests_run_beside_those_of_other_tiers() -> None:
    tests = [f"tests/{place}.py::test" for place in ("e2e/a", "integration/b", "unit/c", "unit/d")]
    _, workers = scheduled(tests)
    assert [worker.given for worker in workers] == [[0, 1], [2, 3]]
