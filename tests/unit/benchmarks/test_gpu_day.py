"""The report of a GPU day: every step is in it, with its outcome or the reason why it did not run."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_day
from benchmarks.gpu_day import Step, figures, report, run, steps


def python(code: str) -> Step:
    return Step(code, lambda seconds: [sys.executable, "-c", code], 0.5)


def test_no_step_keeps_the_others_from_running_and_each_says_what_came_of_it() -> None:
    missing = Step("missing", lambda seconds: ["/no/such/program"], 0.5)
    planned = [python("print('well')"), python("exit(3)"), missing, Step("not here", lambda s: [], 1, lambda: "no GPU")]
    found = run(planned, 1.0, lambda line: None)
    assert [each.verdict.split(":")[0] for each in found] == ["passed", "failed", "not run", "not run"]
    written = report(found, "this machine")
    assert "well" in written and "exit code 3" in written and "not run: no GPU" in written


def test_what_takes_too_long_is_ended_and_what_has_no_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "_SHORTEST_S", 0.0)
    slow = Step("slow", lambda seconds: [sys.executable, "-c", "import time; time.sleep(600)"], 1.0)
    found = run([slow, python("print()")], 2 / 3600, lambda line: None)
    assert [each.verdict for each in found][1] == "not run: no time was left"
    assert found[0].verdict.startswith("failed: not done after")


def test_what_a_step_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sanitizer's program would be on the GPU beside the next step."""
    monkeypatch.setattr(gpu_day, "_SHORTEST_S", 0.0)
    step = Step("some", lambda seconds: ["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    [found] = run([step], 2 / 3600, lambda line: None)
    assert found.verdict.startswith("failed: not done after")
    command = Path(f"/proc/{found.output.strip()}/cmdline")
    # What nobody has waited for has none.
    assert not command.exists() or command.read_text() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_runs_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--out", str(tmp_path / "day")]) == 1
    assert "no GPU" in capsys.readouterr().out
    assert not (tmp_path / "day").exists()


def test_a_step_that_needs_what_is_not_installed_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for an hour has torch, Triton and transformers."""
    monkeypatch.setattr(gpu_day, "find_spec", lambda name: None)
    lacking = {step.name: step.why_not() for step in steps(tmp_path)}
    assert "no grpc here" in lacking["load on a stack"]
    assert lacking["tests/gpu"] == "no pytest here"
    assert not lacking["batch-invariant products beside torch's"]


@pytest.mark.slow
def test_the_step_program_runs_on_little_memory_and_its_figures_are_one_table(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    tiny = "--shape tiny --device cpu --dtype float32 --rows 1 --contexts 64 --steps 2 --positions 1 5 --no-peer"
    both = f"{tiny} --batch-invariant true false --copy-bytes {1 << 23} --json {tmp_path / 'tiny.json'}"
    step = Step("tiny", lambda seconds: [sys.executable, "-m", "benchmarks.gpu", *both.split()], 1.0)
    [found] = run([step], 1.0, lambda line: None)
    assert found.verdict == "passed"
    assert "| 64 | 1 | true / false |" in found.output
    heading, _, *rows = figures(tmp_path).splitlines()
    assert "| from |" in heading and len(rows) == 4
    # Importing torch and transformers takes most of it.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 1 << 20)
