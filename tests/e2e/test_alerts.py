"""Alerts are caused by real faults, on real processes before a real Prometheus. Their times are a sixtieth."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan

from benchmarks.support.asking import make_request
from benchmarks.support.stacks import added_round_trip, changed_draft, delayed
from tests.e2e.test_dashboards import ask, prometheus
from tests.unit.deploy.test_monitoring import MONITORING, rules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the binary of Prometheus"),
]

_FACTOR = 60
_UNITS_S = {"m": 60, "h": 3600}
_FIRES_S = 240.0
# A target that looks at this character computes no numbers. No answer has it: it is a bad word.
_POISON = "~"
_POISON_TOKEN = 96
# The alert compares 10 s with those an hour ago, which is a minute here, and waits 10 s.
_GOOD_S = 40.0
_PROMPT = "Say something long. "
# Long enough for a target that starts again, and shorter than the alerts are waited for.
_IMPATIENT = (
    "--max-queued",
    "24",
    "--queue-timeout",
    "60",
    "--failover-wait-for-target",
    "2",
    "--failover-wait-for-restart",
    "20",
)

Fault = Callable[[Stack, Gateway], AbstractAsyncContextManager[None]]


def shortened(text: str) -> str:
    """Rules whose windows and waits take so much less."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * _UNITS_S[found[3]] // _FACTOR}s"

    return re.sub(r"(for: |offset |\[)(\d+)([mh])", shorter, text)


def narrow(plan: StackPlan, ports: Ports) -> StackPlan:
    """Few answers at once, memory for fewer, a short queue, and a draft that can be moved far away."""
    return replace(
        delayed(replace(plan, targets=()), ports),
        targets=tuple(_told(spec, "--num-blocks", "40", "--max-sequences", "8") for spec in plan.targets),
        controller=_told(plan.controller, *_IMPATIENT),
    )


def _told(spec: ProcessSpec, *flags: str) -> ProcessSpec:
    return replace(spec, argv=(*spec.argv, *flags))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The draft is the target itself."""
    directory = tmp_path_factory.mktemp("models") / "poisonable"
    model = str(tiny_checkpoint(directory, max_context_len=4096, infinite_token=_POISON_TOKEN))
    config = StackConfig(
        target_model=model,
        draft_model=model,
        target_args="--dtype float32 --no-prefix-cache",
        draft_args="--dtype float32 --no-prefix-cache",
        run_dir=tmp_path_factory.mktemp("run"),
    )
    async with Stack(config, amend=narrow) as running:
        yield running


@contextmanager
def frozen(stack: Stack, name: str) -> Iterator[None]:
    """A process or an actor of Ray that neither answers nor ends."""
    pid = stack.processes[name].pid if name in stack.processes else _actor_pid(stack, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _actor_pid(stack: Stack, name: str) -> int:
    controller = psutil.Process(stack.processes["controller"].pid)
    found = [child.pid for child in controller.children(recursive=True) if f"ray::{name}" in " ".join(child.cmdline())]
    assert len(found) == 1, found
    return found[0]


def freezing(name: str) -> Fault:
    @asynccontextmanager
    async def fault(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
        with frozen(stack, name):
            yield

    return fault


def asking(clients: int, tokens: int, prompt: str = _PROMPT) -> Fault:
    """So many clients at once, each of which asks again, whatever it is told."""

    @asynccontextmanager
    async def fault(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
        async def client() -> None:
            while True:
                options = {"max_tokens": tokens, "ignore_eos": True, "bad_words": [_POISON]}
                request = make_request(stack.config.model, prompt, "on", **options)
                with suppress(CommandError):
                    await gateway.answer(request, timeout_s=120.0)
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return fault


def both(first: Fault, second: Fault) -> Fault:
    @asynccontextmanager
    async def fault(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
        async with first(stack, gateway), second(stack, gateway):
            yield

    return fault


def hardly_running(name: str, run_s: float, stop_s: float) -> Fault:
    """A process that gets a small part of its time."""

    @asynccontextmanager
    async def fault(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
        async def pulse() -> None:
            while True:
                with frozen(stack, name):
                    await asyncio.sleep(stop_s)
                await asyncio.sleep(run_s)

        task = asyncio.create_task(pulse())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return fault


@asynccontextmanager
async def dying_target(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
    # Short, so that the target's memory holds more of them at once than the alert's threshold.
    async with asking(6, 80)(stack, gateway):
        await asyncio.sleep(3)
        os.kill(stack.processes["target-0"].pid, signal.SIGKILL)
        await stack.restart("target-0")
        yield


@asynccontextmanager
async def draft_far_away(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
    async with asking(2, 200)(stack, gateway):
        await added_round_trip(stack, 300.0)
        try:
            yield
        finally:
            await added_round_trip(stack, 0.0)


@asynccontextmanager
async def draft_of_another_model(stack: Stack, gateway: Gateway) -> AsyncIterator[None]:
    """After a while with a draft that is always right."""
    sound = stack.processes["draft-0"].spec
    other = str(tiny_checkpoint(stack.run_dir / "other", max_context_len=4096, seed=1))
    async with asking(2, 200)(stack, gateway):
        await asyncio.sleep(_GOOD_S)
        await stack.restart("draft-0", changed_draft(sound, "model", other, other))
        try:
            yield
        finally:
            await stack.restart("draft-0", sound)


FAULTS: list[tuple[Fault, set[str]]] = [
    (freezing("draft-0"), {"OutriderNoDraft"}),
    (freezing("redis"), {"OutriderMetadataAway"}),
    (freezing("gateway"), {"OutriderNoGateway"}),
    (freezing("ControlPlane"), {"OutriderNoControl"}),
    (freezing("Router"), {"OutriderNoRouter"}),
    (both(asking(2, 200), hardly_running("draft-0", 0.05, 0.5)), {"OutriderTenantAlert drafts_starved"}),
    (draft_far_away, {"OutriderDraftsLate"}),
    (draft_of_another_model, {"OutriderAcceptanceFell", "OutriderTenantAlert acceptance_fell"}),
    (
        both(asking(24, 300), hardly_running("target-0", 0.2, 0.2)),
        {"OutriderTargetsFull", "OutriderFirstTokenSlow"},
    ),
    # The short ones let the router expect that the long ones are short too.
    (both(asking(6, 4), asking(4, 600)), {"OutriderPreemptions"}),
    (asking(1, 4, _POISON), {"OutriderStepFailures"}),
    (asking(60, 300), {"OutriderRequestsRefused"}),
    (dying_target, {"OutriderTargetsFail"}),
    (freezing("target-0"), {"OutriderNoTarget"}),
    (both(freezing("target-0"), asking(16, 20)), {"OutriderRequestsFail"}),
]
"""In this order, for one after another is caused on the same stack."""


async def _firing(client: httpx.AsyncClient) -> set[str]:
    """By name; those of tenants with their kind."""
    found = [one["metric"] for one in await ask(client, 'ALERTS{alertstate="firing"}')]
    return {" ".join(filter(None, (metric["alertname"], metric.get("alert")))) for metric in found}


async def _become(client: httpx.AsyncClient, alerts: set[str], *, firing: bool) -> None:
    """Each of them at some time."""
    left = set(alerts)
    try:
        async with asyncio.timeout(_FIRES_S):
            while left:
                now = await _firing(client)
                left -= now if firing else left - now
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"{', '.join(sorted(left))}: {'silent' if firing else 'firing'} after {_FIRES_S:g} s")


async def test_each_alert_fires_on_its_fault(narrow_stack: Stack, tmp_path: Path) -> None:
    stack, short = narrow_stack, tmp_path / "rules.yaml"
    short.write_text(shortened((MONITORING / "rules.yaml").read_text()))
    async with (
        prometheus(tmp_path, stack.scrape_file, short) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0) as client,
        Gateway(stack.gateway_grpc) as gateway,
    ):
        for fault, alerts in FAULTS:
            await _become(client, alerts, firing=False)
            async with fault(stack, gateway):
                await _become(client, alerts, firing=True)
            await stack.assembled()
    caused = {alert.partition(" ")[0] for _, alerts in FAULTS for alert in alerts}
    assert caused == {rule["alert"] for rule in rules() if "alert" in rule}
