"""What the first hours on a GPU are for: everything that only a GPU can show, one step after another, in one report.

    python -m benchmarks.gpu_day --hours 1 --out build/gpu-day

Looks for a GPU first: without one nothing runs. It needs no network and installs nothing: with torch, Triton and
transformers alone, steps that need more say what is missing. One that fails keeps the end of its output, and none keeps
the others from running. The last one, load on a stack, gets the time that the others leave. The report ends with one
table of all figures. Exit code 0 only if every step has run and succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_TAIL = 4000
_SHORTEST_S = 20.0
_GRACE_S = 30.0
"""In which a stack closes."""
_LOAD = """shape: {{kind: steady, num_users: 64, seconds: {seconds}}}
slo: {{ttft_ms: 2000, tpot_ms: 200}}
warm_up_s: 5
tenants:
  - {{name: chat, protocol: http, categories: [prose, qa], max_tokens: 128}}
  - {{name: code, protocol: grpc, categories: [code, math_reasoning], max_tokens: 128}}
"""


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    command: Callable[[float], Sequence[str]]
    """Of the seconds that it has."""
    share: float
    """Of the time that is left when it starts, at most."""
    why_not: Callable[[], str] = lambda: ""
    """Why it cannot run here; empty if it can."""


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: str
    """passed, failed, or why it did not run."""
    seconds: float = 0.0
    output: str = ""


def no_gpu() -> str:
    if find_spec("torch") is None:
        return "no GPU: torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "no GPU: torch finds no CUDA device"


def _no_sanitizer() -> str:
    return "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH"


def _lacks(*modules: str) -> Callable[[], str]:
    """Which of them a step would miss. The generated code of the wire is made where the project is installed."""
    return lambda: ", ".join(f"no {name} here" for name in modules if find_spec(name) is None)


def steps(out: Path) -> list[Step]:
    """In the order of what is worth most."""
    python = sys.executable
    tests = [python, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    bench = [python, "-m", "benchmarks.gpu"]
    line = ["--shape", "1b", "--rows", "1", "4", "16", "64", "--json", str(out / "step-line.json")]
    price = [*_PRICE, "--json", str(out / "batch-invariant.json")]
    roofline = ["--shape", "8b", "--rows", "1", "--matmuls", "--peer-static", "--json", str(out / "roofline.json")]
    load = ["env", "OUTRIDER_DEVICE=cuda", python, "-m", "loadtest", "--up", "--out", str(out / "load")]
    stack = _lacks("grpc", "click", "outrider.rpc.v1.attach_pb2")
    return [
        Step("tests/gpu", lambda s: tests, 0.3, _lacks("pytest")),
        Step("batch-invariant products beside torch's", lambda s: [*bench, *price], 0.4),
        Step("roofline: a step over reading its weights", lambda s: [*bench, *roofline], 0.5),
        Step("step line: a step's time by rows", lambda s: [*bench, *line], 0.4),
        Step("host: the step thread without a model", lambda s: [python, "-m", "benchmarks", "host"], 0.2, stack),
        Step("sanitizer", lambda s: ["compute-sanitizer", "--error-exitcode", "9", *tests, "-x"], 0.4, _no_sanitizer),
        Step("load on a stack", lambda s: [*load, "--profile", _profile(out, s)], 1.0, stack),
    ]


def _profile(out: Path, seconds: float) -> str:
    """Leaves time for the start of the stack and its end."""
    path = out / "load.yaml"
    path.write_text(_LOAD.format(seconds=max(10, int(0.7 * seconds))))
    return str(path)


_BOTH = ["--positions", "1", "5", "--batch-invariant", "true", "false", "--no-peer"]
_PRICE = ["--shape", "8b", "--rows", "1", "8", "32", "64", "--contexts", "512", "--steps", "30", *_BOTH]


def run(planned: Sequence[Step], hours: float, say: Callable[[str], None]) -> list[Outcome]:
    """All steps, within the time."""
    until_s, found = time.monotonic() + 3600 * hours, list[Outcome]()
    for step in planned:
        left_s = until_s - time.monotonic()
        reason = step.why_not() or ("" if left_s > _SHORTEST_S else "no time was left")
        outcome = Outcome(step.name, f"not run: {reason}") if reason else _run(step, step.share * left_s)
        say(f"{outcome.name}: {outcome.verdict} ({outcome.seconds:.0f} s)")
        found.append(outcome)
    return found


def _run(step: Step, seconds: float) -> Outcome:
    started_s = time.monotonic()
    try:
        process = subprocess.Popen(
            step.command(seconds), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as error:
        return Outcome(step.name, f"not run: {error}")
    try:
        output, _ = process.communicate(timeout=seconds)
        verdict = "passed" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        output, verdict = _end(process), f"failed: not done after {seconds:.0f} s"
    return Outcome(step.name, verdict, time.monotonic() - started_s, output[-_TAIL:])


def _end(process: subprocess.Popen[str]) -> str:
    """Ends a step with all that it started, which would be on the GPU beside the next step. Returns what it said."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def figures(out: Path) -> str:
    """The steps of models that were timed, as one table."""
    found = [(path.stem, step) for path in sorted(out.glob("*.json")) for step in json.loads(path.read_text())["steps"]]
    names = list(dict.fromkeys(name for _, step in found for name in step))
    lines = [["from", *names], ["---"] * (1 + len(names))]
    lines += [[source, *(_said(step.get(name, "")) for name in names)] for source, step in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _said(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(outcomes: Sequence[Outcome], machine: str) -> str:
    """As Markdown."""
    parts = [f"# GPU day\n\n{machine}\n", "| step | outcome | seconds |\n|---|---|---|"]
    parts[-1] += "".join(f"\n| {each.name} | {each.verdict} | {each.seconds:.0f} |" for each in outcomes)
    parts += [f"\n## {each.name}\n\n```\n{each.output.strip()}\n```" for each in outcomes if each.output.strip()]
    return "\n".join(parts) + "\n"


def _machine() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-day"))
    options = parser.parse_args(arguments)
    if reason := no_gpu():
        print(reason)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for earlier in options.out.glob("*.json"):
        earlier.unlink()
    outcomes = run(steps(options.out), options.hours, lambda line: print(line, flush=True))
    path = options.out / "report.md"
    table = f"\n## Figures\n\n{figures(options.out)}\n"
    path.write_text(report(outcomes, _machine()) + table)
    print(f"{_machine()} Report: {path}\n{table}")
    return 0 if all(outcome.verdict == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
