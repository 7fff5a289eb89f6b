"""docs/examples/release_drafts.py with a real control plane. Training is replaced, and the worker is simulated."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from outrider.metadata.events import EventKind
from outrider_controller.control.alerts.active import AlertKind

from tests.fakes import FakeDraft, serving_draft
from tests.integration.router.conftest import Cluster, Fleet, soon

EXAMPLE = Path(__file__).parents[3] / "docs/examples/release_drafts.py"
NAME = f"acme-{time.strftime('%Y-%m-%d')}"
COMMAND = """#!/bin/sh
echo "$@" >> {log}
case $1 in
distill) mkdir -p "$2"; case "$*" in *--adapter*) touch "$2/adapter_config.json" ;; esac ;;
compare) echo '{{"drafts": [{{"all": {{"tokens_per_round": 1.5}}}}, {{"all": {{"tokens_per_round": {new}}}}}]}}' ;;
draft) exec sleep 600 ;;
*) exec {python} -m outrider_controller.cli "$@" --control {control} ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, log: Path) -> Callable[..., subprocess.Popen[str]]:
    """Runs the example once, on commands of which those that train and draft are replaced."""

    def started(new: float, *more: str) -> subprocess.Popen[str]:
        command = tmp_path / "outrider"
        command.write_text(COMMAND.format(log=log, new=new, python=sys.executable, control=cluster.control))
        command.chmod(0o755)
        example = tmp_path / EXAMPLE.name
        example.write_text(EXAMPLE.read_text().replace("PAUSE_S = 5.0", "PAUSE_S = 0.5"))
        given = ["--samples-dir", str(tmp_path / "samples"), "--metadata", "redis://x", *more, "--train-tokens", "9"]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        program = [sys.executable, str(example), str(tmp_path / "drafts"), *given, "--once"]
        return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)

    return started


async def fell(fleet: Fleet) -> None:
    fields = {"alert": AlertKind.ACCEPTANCE_FELL.value, "tenant": "acme", "model": "tiny", "reason": "0.40"}
    await fleet.store.emit(EventKind.ALERT_RAISED, fields)


def consent(outrider: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: acme, samples: text}]\n")
    outrider("apply", "-f", str(tmp_path / "tenants.yaml"))


@pytest.mark.parametrize("adapter", [(), pytest.param(("--adapter", "8"), marks=pytest.mark.slow)])
def test_a_tenant_whose_acceptance_fell_gets_a_draft_or_adapter_of_its_own(
    cluster: Cluster,
    outrider: Callable[..., Any],
    start: Callable[..., Any],
    log: Path,
    tmp_path: Path,
    adapter: tuple[str, ...],
) -> None:
    consent(outrider, tmp_path)
    cluster.within(fell)
    stack = AsyncExitStack()

    async def work(fleet: Fleet) -> None:
        draft = await stack.enter_async_context(serving_draft(FakeDraft(model=NAME, candidate=True)))
        await stack.enter_async_context(fleet.store.register(draft.info, draft.address, lambda: draft.load))

    cluster.within(work)
    example = start(1.6, *adapter)
    try:
        soon(lambda: _rollout(outrider).get("state") == "running", within_s=60.0)
        assert _rollout(outrider)["tenant"] == "acme"
        outrider("rollout", "promote", NAME)
        said, _ = example.communicate(timeout=60)
    finally:
        example.kill()
        cluster.within(lambda fleet: stack.aclose())
    assert example.returncode == 0 and f"{NAME}: promoted" in said
    distilled = next(line for line in log.read_text().splitlines() if line.startswith("distill"))
    assert "--from-samples acme" in distilled and distilled.endswith("--train-tokens 9")
    worker = next(line for line in log.read_text().splitlines() if line.startswith("draft"))
    out = tmp_path / "drafts" / NAME
    named = f"--model smollm2-135m-draft --adapters {out} --model-name {NAME}" if adapter else f"--model {out}"
    assert worker.startswith(f"draft {named} --candidate")


def test_a_draft_that_is_no_better_gets_no_worker(
    cluster: Cluster, outrider: Callable[..., Any], start: Callable[[float], Any], log: Path, tmp_path: Path
) -> None:
    cluster.within(fell)
    start(1.5).communicate(timeout=60)
    assert "distill" not in log.read_text(), "without the tenant's consent nothing is read"
    consent(outrider, tmp_path)
    said, _ = start(1.5).communicate(timeout=60)
    commands = [line.split()[0] for line in log.read_text().splitlines()]
    assert f"{NAME}: 1.50 tokens a round" in said and "distill" in commands and "draft" not in commands


def _rollout(outrider: Callable[..., Any]) -> dict[str, Any]:
    drafts = outrider("get", "drafts", "-o", "name").split()
    found = outrider("rollout", "status", NAME, "-o", "json")["rollout"] if NAME in drafts else None
    return dict(found or {})
