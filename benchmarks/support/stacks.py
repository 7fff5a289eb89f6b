"""Changes to a stack for measurements: other drafts, a longer round trip to workers, a client off their cores.

All use the public command lines of the processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outrider.model_names import served_name
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackPlan

from benchmarks.support.delay_proxy import set_round_trip

ROOT = Path(__file__).resolve().parents[2]
_CHANGED_DRAFT = "benchmarks.support.changed_draft"
_HOST = "127.0.0.1"
_PROXY = "proxy"


def with_options(argv: tuple[str, ...], **values: str) -> tuple[str, ...]:
    """The command line with other values. Raises ValueError for an option that it does not have."""
    changed = list(argv)
    for name, value in values.items():
        changed[argv.index(f"--{name.replace('_', '-')}") + 1] = value
    return tuple(changed)


def changed_draft(spec: ProcessSpec, model: str, path: str, change: str = "") -> ProcessSpec:
    """A draft at the same address. `change`: one of benchmarks.support.changed_draft; empty: the shipped draft."""
    python, flag, module, *flags = spec.argv
    # The first argument of an already changed draft is its change.
    flags = flags[1:] if module == _CHANGED_DRAFT else flags
    program = (_CHANGED_DRAFT, change) if change else ("outrider.draft",)
    argv = with_options((python, flag, *program, *flags), model=path, model_name=served_name(model))
    return replace(spec, argv=argv, env={**spec.env, **_with_benchmarks()})


def unpriced_targets(targets: tuple[ProcessSpec, ...], line_file: Path) -> tuple[ProcessSpec, ...]:
    """The same targets, with a switch to run every row: benchmarks.support.unpriced_target."""

    def changed(spec: ProcessSpec) -> ProcessSpec:
        python, flag, _, *flags = spec.argv
        argv = (python, flag, "benchmarks.support.unpriced_target", str(line_file), *flags)
        return replace(spec, argv=argv, env={**spec.env, **_with_benchmarks()})

    return tuple(map(changed, targets))


async def replace_drafts(stack: Stack, model: str, change: str = "") -> None:
    """Replaces the drafts, each at the same address. Waits until the new ones are paired."""
    path = str(stack.target_path) if model == stack.config.target_model else model
    for number in range(stack.config.drafts):
        old = stack.processes[f"draft-{number}"]
        await stack.restart(old.spec.name, changed_draft(old.spec, model, path, change))
    await stack.assembled()


def delayed(plan: StackPlan, ports: Ports) -> StackPlan:
    """All connections to workers go through a proxy that can add to the round trip: `added_round_trip`."""
    listens: list[str] = []

    def advertising(worker: ProcessSpec) -> ProcessSpec:
        port = ports.claim()
        listens.append(f"{port}={worker.address}")
        return replace(worker, argv=(*worker.argv, "--advertise", f"{_HOST}:{port}"))

    targets, drafts = (tuple(map(advertising, workers)) for workers in (plan.targets, plan.drafts))
    control = ports.claim()
    argv = (sys.executable, "-m", "benchmarks.support.delay_proxy", str(control), *listens)
    endpoints = {"control": f"{_HOST}:{control}"}
    proxy = ProcessSpec(_PROXY, argv, "", endpoints, plan.gateway.cores, _with_benchmarks())
    return replace(plan, targets=targets, drafts=drafts, others=(proxy,))


async def added_round_trip(stack: Stack, added_ms: float) -> None:
    """Sets the round trip added to workers. Only for a stack whose plan is `delayed`. Raises OSError."""
    control = stack.processes[_PROXY].spec.endpoints["control"]
    await set_round_trip(int(control.rpartition(":")[2]), added_ms)


@contextmanager
def outside_cores(stack: Stack) -> Iterator[None]:
    """Keeps this process off the targets' cores for the block, where workers are pinned.

    A client that wakes on a target's core for each round would take time from the next step.
    """
    before = os.sched_getaffinity(0)
    _confine(stack.cores.rest or before)
    try:
        yield
    finally:
        _confine(before)


def _confine(cores: Iterable[int]) -> None:
    """Pins all threads of this process, including gRPC's, to these cores."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _with_benchmarks() -> dict[str, str]:
    """The environment in which a child finds this package from any directory."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
