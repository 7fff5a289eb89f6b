"""Real processes of two protocol versions, beside one another in each role: what is said is what one version says.

Nothing speaks a second version yet. What stands for a process of a later release is today's, which says that it speaks
version 2.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path

import pytest
import pytest_asyncio
from outrider.local import Speculator
from outrider.protocol.identity import ProtocolRange
from outrider.rpc.v1 import control_pb2, generation_pb2, router_pb2, trace_pb2, worker_pb2
from outrider_controller.cli.client import Gateway, GatewayAnswer
from outrider_controller.cli.clusters.control import call_control
from outrider_controller.cli.up.ports import Ports
from outrider_controller.cli.up.process import ProcessSpec
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig, StackPlan

from tests.soak.rolling import in_twos

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(400)]

_MAX_TOKENS = 32

NEXT, AFTER_NEXT = ProtocolRange(1, 2), ProtocolRange(2, 2)
# Of each role the first process speaks today's version alone.
PAIRS = {"gateway": ("gateway", "gateway-1")} | {r: (f"{r}-0", f"{r}-1") for r in ("router", "target", "draft")}
AT_ONCE = 8
TIMEOUT_S = 120
# Before `-m` and the rest: the process's one SPOKEN is another before anything else of it runs.
LAUNCHER = """
import runpy, sys
from outrider.protocol.identity import SPOKEN
for name in ("oldest", "newest"):
    object.__setattr__(SPOKEN, name, int(sys.argv.pop(1)))
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

Route = tuple[str, ...]
"""Of one request: its gateway, router, target and draft."""


def speaking(spec: ProcessSpec, spoken: ProtocolRange) -> ProcessSpec:
    rest = spec.argv[spec.argv.index("-m") :]
    argv = (sys.executable, "-c", LAUNCHER, str(spoken.oldest), str(spoken.newest), *rest)
    return replace(spec, argv=argv)


def with_later_ones(plan: StackPlan, ports: Ports) -> StackPlan:
    plan = in_twos(False, plan, ports)
    later = {second for _, second in PAIRS.values()}

    def amended(specs: tuple[ProcessSpec, ...]) -> tuple[ProcessSpec, ...]:
        return tuple(speaking(spec, NEXT) if spec.name in later else spec for spec in specs)

    # The control plane, too: it is the only one.
    return replace(
        plan,
        targets=amended(plan.targets),
        drafts=amended(plan.drafts),
        controller=speaking(plan.controller, NEXT),
        others=amended(plan.others),
    )


class Fleet:
    """Two processes of each role."""

    def __init__(self, stack: Stack, expected: Mapping[tuple[int, ...], str]) -> None:
        self.stack = stack
        self.specs = {name: process.spec for name, process in stack.processes.items()}
        self._expected = cycle(expected.items())

    async def ask(self, gateway: str) -> list[GatewayAnswer]:
        """Several at once. Each has the text that it should have."""
        asked = list(islice(self._expected, AT_ONCE))
        async with Gateway(self.specs[gateway].address) as connected:
            given = await asyncio.gather(*(connected.answer(self._request(p), TIMEOUT_S) for p, _ in asked))
        assert [answer.text for answer in given] == [text for _, text in asked]
        return given

    def _request(self, prompt: Sequence[int]) -> generation_pb2.GenerateRequest:
        options = generation_pb2.GenerationOptions(max_tokens=32, temperature=0.0, include_metrics=True)
        options.speculation = router_pb2.SPECULATION_MODE_ON
        request = generation_pb2.GenerateRequest(model=self.stack.config.model, options=options)
        request.tokens.token_ids.extend(prompt)
        return request

    async def routes(self, gateway: str) -> set[Route]:
        """Of requests that one target and one draft served, which the target accepted something of."""
        pids = {process.pid: name for name, process in self.stack.processes.items()}
        names = {one.info.worker_id: pids.get(one.pid, "") for one in await self.stack.workers()}
        found = set[Route]()
        for answer in await self.ask(gateway):
            if not answer.sums.num_accepted_draft_tokens:
                continue
            trace = await self._trace(answer.id)
            opened = [e for e in trace.events if e.kind == trace_pb2.TRACE_EVENT_KIND_OPENED]
            roles = {e.role: e.worker_id for e in opened}
            if len(opened) == len(roles) == 2:
                workers = roles[worker_pb2.WORKER_ROLE_TARGET], roles[worker_pb2.WORKER_ROLE_DRAFT]
                found.add((gateway, *(names[each] for each in (trace.router_id, *workers))))
        return found

    async def _trace(self, request_id: str) -> trace_pb2.RequestTrace:
        asked = control_pb2.ControlServiceGetTraceRequest(request_id=request_id)
        found = await call_control(self.stack.control, lambda control: control.GetTrace(asked, timeout=10))
        (trace,) = found.traces
        return trace

    async def worker_id(self, name: str) -> str:
        pid = self.stack.processes[name].pid
        return next(one.info.worker_id for one in await self.stack.workers() if one.pid == pid)

    async def until_logged(self, name: str, words: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while words not in self.stack.processes[name].log_path.read_text():
                # Some is only said when a request needs it.
                await self.ask("gateway")


def expected_texts(model: Path, count: int) -> dict[tuple[int, ...], str]:
    """What the model says by itself, in this process: no network, no draft."""
    prompts = [tuple(b"Tell me a story about number %d." % number) for number in range(count)]
    alone = Speculator(str(model), dtype="float32").generate(prompts, max_new_tokens=_MAX_TOKENS, speculate=False)
    return {prompt: completion.text for prompt, completion in zip(prompts, alone, strict=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> AsyncIterator[Fleet]:
    config = StackConfig(
        target_model=str(tiny),
        draft_model=str(tiny),
        targets=2,
        drafts=2,
        routers=2,
        target_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
        draft_args=f"--dtype float32 --kv-cache-bytes {64 << 20}",
        run_dir=tmp_path_factory.mktemp("run"),
    )
    # Many, so that no worker is chosen for what it has in its cache.
    expected = await asyncio.to_thread(partial(expected_texts, tiny, 100))
    async with Stack(config, amend=with_later_ones) as stack:
        yield Fleet(stack, expected)


async def test_every_mixture_of_two_versions_serves(fleet: Fleet) -> None:
    mixtures, served = set(product(*PAIRS.values())), set[Route]()
    with suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            while served != mixtures:
                for gateway in PAIRS["gateway"]:
                    served |= await fleet.routes(gateway)
    assert served == mixtures


async def test_who_has_no_common_version_is_refused_by_name_and_all_others_serve(fleet: Fleet) -> None:
    """One after the other, until the first processes and the second ones are two fleets that share a store."""
    refused = "protocol_version: 1 is spoken here, 2 by"

    async def upgraded(role: str) -> str:
        _, name = PAIRS[role]
        await fleet.stack.restart(name, speaking(fleet.specs[name], AFTER_NEXT))
        return await fleet.worker_id(name)

    target = await upgraded("target")
    await fleet.until_logged("router-0", f"{refused} {target}")
    draft, partner = await upgraded("draft"), await fleet.worker_id("target-0")
    why = "protocol_version is 1 on the target and 2 on the draft"
    await fleet.until_logged("router-0", f"draft {draft} cannot serve target {partner}: {why}")
    router = await upgraded("router")
    await fleet.until_logged("gateway", f"a router is not used: {refused} {router}")
    await upgraded("gateway")
    left = await fleet.worker_id("router-0")
    await fleet.until_logged("gateway-1", f"a router is not used: protocol_version: 2 is spoken here, 1 by {left}")
    for gateway, names in zip(PAIRS["gateway"], zip(*PAIRS.values(), strict=True), strict=True):
        while (found := await fleet.routes(gateway)) != {names}:
            assert not found
