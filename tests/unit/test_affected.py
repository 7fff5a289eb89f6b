"""Which slow tests a change touches, and what happens when there is no time for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.affected import ROOT, changed_paths, touched

# Its time is over when the first test is, however long the machine needs for that.
RUN = """
import signal, sys, pytest
from tests.affected import Within

class UntilTheFirst(Within):
    def pytest_runtest_logreport(self, report):
        super().pytest_runtest_logreport(report)
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, 0.1)

sys.exit(pytest.main(["-n", "1", "-c", "/dev/null", sys.argv[1]], plugins=[UntilTheFirst(1000)]))
"""


def test_what_tests_the_changed_package_comes_before_what_only_uses_it() -> None:
    files = touched(["services/outrider/engine/run/graphs.py"])
    assert files[0].startswith("tests/unit/engine/")
    assert "tests/simulation/test_schedules.py" in files
    assert "tests/soak/test_whole_stack.py" in files


def test_who_does_not_use_what_has_changed_is_left_alone() -> None:
    files = touched(["controller/outrider_controller/router/speculation/controller.py"])
    assert "tests/simulation/test_schedules.py" in files
    assert not [file for file in files if file.startswith(("tests/unit/engine/", "tests/integration/draft/"))]


@pytest.mark.parametrize("path", ["services/outrider/vllm/plugin.py", "services/outrider/vllm/server/feed.py"])
def test_what_vllm_loads_touches_all_tests_on_vllm_before_others(path: str) -> None:
    """The fast ones too: nothing else runs them."""
    on_vllm = {str(file.relative_to(ROOT)) for file in (ROOT / "tests/vllm").glob("test_*.py")}
    assert set(touched([path])[: len(on_vllm)]) == on_vllm


def test_a_process_started_by_its_command_line_is_found_by_the_folders_name() -> None:
    assert "tests/integration/target/test_refusals.py" in touched(["services/outrider/engine/kv/step.py"])


def test_a_test_touches_itself_and_a_helper_those_beside_it() -> None:
    file = "tests/unit/engine/run/test_graphs.py"
    assert touched([file]) == [file]
    assert set(touched(["tests/simulation/world.py"])) == {
        "tests/simulation/test_planted.py",
        "tests/simulation/test_schedules.py",
    }


def test_a_chart_and_a_page_are_no_modules_and_touch_the_tests_that_read_them() -> None:
    chart = touched(["deploy/k8s/templates/gateway.yaml"])
    assert {"tests/unit/deploy/test_values.py", "tests/e2e/test_alerts.py"} <= set(chart)
    page = "controller/outrider_controller/control/console/static/console.js"
    assert touched([page])[0] == "tests/unit/controller/control/console/test_page.py"


@pytest.mark.parametrize("path", ["README.md", "docs/benchmarks.md", "a-new-file"])
def test_words_touch_nothing(path: str) -> None:
    assert touched([path]) == []


def test_what_sets_up_every_test_touches_every_slow_one() -> None:
    assert set(touched(["pyproject.toml"])) > set(touched(["services/outrider/speculation/verification.py"]))


def test_a_change_is_all_since_it_left_the_main_branch_and_on_it_the_last_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    commit("first")
    assert changed_paths(tmp_path) == ["first"]
    commit("second")
    assert changed_paths(tmp_path) == ["second"]
    git("switch", "-c", "change")
    commit("third")
    commit("fourth")
    assert changed_paths(tmp_path) == ["fourth", "third"]


@pytest.mark.slow
@pytest.mark.parametrize("first, code", [("pass", 0), ("assert False", 1)], ids=["none has failed", "one has failed"])
def test_when_the_time_is_over_what_ran_counts_and_the_rest_is_named(tmp_path: Path, first: str, code: int) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        f"import time\ndef test_first(): {first}\ndef test_long(): time.sleep(600)\ndef test_last(): pass\n"
    )
    command = [sys.executable, "-c", RUN, str(test)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    left = [line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("left out")]
    assert left == ["test_last", "test_long"]
