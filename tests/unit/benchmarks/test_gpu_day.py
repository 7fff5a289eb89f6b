"""The report of a GPU day: every step is in it, with its outcome or the reason why it did not run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_controller.cli.drafts.distill import distill

from benchmarks import gpu_day
from benchmarks.gpu_day import Step, figures, report, run, steps
from benchmarks.scenarios.latency import latency


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


def test_the_report_is_written_after_each_step_with_what_an_ended_one_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may go away at any time."""
    monkeypatch.setattr(gpu_day, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(gpu_day, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_day, "_machine", lambda: "a card")
    part = f"echo '{json.dumps({'steps': [{'step_ms': 5.5}]})}' > {tmp_path}/a.json; echo half; sleep 600"
    slow = Step("slow", lambda seconds: ["sh", "-c", part], 0.9, figures="a")
    seen = Step("seen", lambda seconds: ["cp", str(tmp_path / "report.md"), str(tmp_path / "then.md")], 1.0)
    monkeypatch.setattr(gpu_day, "steps", lambda out, files: [slow, seen])
    gpu_day.main(["--out", str(tmp_path), "--pack", str(tmp_path / "none"), "--hours", str(2 / 3600)])
    then = (tmp_path / "then.md").read_text()
    assert "| slow | failed: not done after" in then and "half" in then and "| a | 5.5 |" in then


def test_what_a_step_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sanitizer's program would be on the GPU beside the next step."""
    monkeypatch.setattr(gpu_day, "_SHORTEST_S", 0.0)
    step = Step("some", lambda seconds: ["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    [found] = run([step], 2 / 3600, lambda line: None)
    assert found.verdict.startswith("failed: not done after")
    command = Path(f"/proc/{found.output.strip()}/cmdline")
    # What nobody has waited for has none.
    assert not command.exists() or command.read_text() == ""


def test_a_step_that_needs_what_is_not_installed_says_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for an hour has torch, Triton and transformers."""
    monkeypatch.setattr(gpu_day, "find_spec", lambda name: None)
    lacking = {step.name: step.why_not() for step in steps(tmp_path)}
    assert "no grpc here" in lacking["load on a stack"]
    assert lacking["tests/gpu"] == "no pytest here"
    assert not lacking["batch-invariant products beside torch's"]


def test_a_day_on_a_gpu_ends_with_one_table_and_tells_by_its_exit_that_something_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier day measured is in no table of this one."""
    write = f"import json; json.dump({{'steps': [{{'step_ms': 5.5}}]}}, open({str(tmp_path / 'ours.json')!r}, 'w'))"
    ours = replace(python(write), name="ours", figures="ours")
    missing = replace(python("exit()"), name="vLLM", figures="vllm-alone", why_not=lambda: "no vllm here")
    (tmp_path / "vllm-alone.json").write_text(json.dumps({"steps": [{"step_ms": 4.7}]}))
    monkeypatch.setattr(gpu_day, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_day, "_machine", lambda: "a card")
    monkeypatch.setattr(gpu_day, "steps", lambda out, files: [ours, missing])
    assert gpu_day.main(["--out", str(tmp_path), "--pack", str(tmp_path / "none")]) == 1
    table = capsys.readouterr().out.partition("## Figures")[2]
    assert "| ours | 5.5 |" in table and "| vllm-alone |  | not run: no vllm here |" in table and "4.7" not in table
    assert (tmp_path / "report.md").read_text().endswith(table.rstrip("\n") + "\n\n\n")


def test_what_was_packed_is_found_after_what_is_there_by_this_process_and_those_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {name: tmp_path / name for name in ("site", "files")}
    (place["site"] / "generated").mkdir(parents=True)
    (place["site"] / "packed_for_a_test.py").write_text("")
    (place["site"] / "click.py").write_text("raise ImportError('not this one')")
    (place["site"] / "generated/new_pb2.py").write_text("new")
    (place["site"] / "generated/old_pb2.py").write_text("new")
    (code := tmp_path / "code").mkdir()
    (code / "old_pb2.py").write_text("old")
    monkeypatch.setattr(gpu_day, "GENERATED", code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert gpu_day.use(place) == place["files"]
    assert os.environ["OUTRIDER_CACHE"] == str(place["files"] / "cache")
    assert gpu_day.find_spec("packed_for_a_test") is not None
    subprocess.run([sys.executable, "-c", "import packed_for_a_test"], check=True, env=dict(os.environ))
    assert "packed" not in str(gpu_day.find_spec("click")) and str(tmp_path) not in str(gpu_day.find_spec("click"))
    assert [(code / f"{name}_pb2.py").read_text() for name in ("old", "new")] == ["old", "new"]


def test_the_commands_of_a_stack_and_of_distilling_take_their_options(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    commands = {step.figures: [*step.command(180)[1:]] for step in steps(tmp_path, tmp_path)}
    for name, program, command in (
        ("distil", ["-m", "outrider_controller.cli", "distill"], distill),
        ("stack-head", ["-m", "benchmarks", "latency"], latency),
        ("stack-worker", ["-m", "benchmarks", "latency"], latency),
    ):
        assert commands[name][:3] == program
        assert command.make_context(program[-1], commands[name][3:]).params["json_file"] == tmp_path / f"{name}.json"


def test_the_card_learns_from_prompts_that_were_packed(tmp_path: Path) -> None:
    command = {step.name: step.command(180) for step in steps(tmp_path, tmp_path)}["distil"]
    assert "--prompts" not in command and command[command.index("--minutes") + 1] == "2.00"
    (tmp_path / "learn.jsonl").write_text("")
    assert str(tmp_path / "learn.jsonl") in {s.name: s.command(180) for s in steps(tmp_path, tmp_path)}["distil"]


@pytest.mark.slow
def test_the_step_program_runs_on_little_memory_and_its_figures_are_one_table(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    tiny = "--shape tiny --device cpu --dtype float32 --rows 1 --contexts 64 --steps 2 --positions 1 5 --no-peer"
    both = f"{tiny} --batch-invariant true false --copy-bytes {1 << 23} --json {tmp_path / 'tiny.json'}"
    step = Step("tiny", lambda seconds: [sys.executable, "-m", "benchmarks.gpu", *both.split()], 1.0)
    [found] = run([step], 1.0, lambda line: None)
    assert found.verdict == "passed"
    assert "| 64 | 1 | true / false |" in found.output
    heading, _, *rows = figures(tmp_path, [replace(found, figures="tiny")]).splitlines()
    assert "| from |" in heading and len(rows) == 4
    # Importing torch and transformers takes most of it.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 1 << 20)
