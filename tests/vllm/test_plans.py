"""vLLM's scheduler with a made-up model: the next step is planned when the drafts that are on their way have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.sequence.key import SequenceKey
from outrider.target.requests.events import Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.step.worker import TargetWorker
from outrider.tree import DraftTree
from outrider.vllm.front import WORKER
from outrider.vllm.scheduler import METHOD
from outrider.vllm.server.server_drafts import Followed
from outrider.vllm.target.engine import SCHEDULER
from outrider.vllm.target.machine import VllmEngine
from outrider.worker.events import Opened
from outrider.worker.step_cost import StepCost

from benchmarks.vllm_host import BLOCK, NUM_DRAFTED, make_scheduler, new_request
from tests.unit.target.harness import WorkerBench, key, opening
from tests.vllm.test_steps import VOCAB, Device, continued

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Core:
    """Runs a scheduler as vLLM's core does whose steps overlap."""

    request_block_hasher = None

    def __init__(self, model: Path, *, plugin: bool) -> None:
        """`plugin`: of `vllm serve`, else a target's."""
        speculation = {"method": METHOD, "num_speculative_tokens": NUM_DRAFTED}
        ours = {"scheduler_cls": SCHEDULER, "worker_cls": WORKER, "speculative_config": speculation}
        more = {"enable_prefix_caching": False} | ({} if plugin else ours)
        self.scheduler = make_scheduler(model, 4, plugin=plugin, **more)
        self.scheduler.book.price_of = lambda cost: 0.0
        self.scheduler.kv_event_publisher = SimpleNamespace(take=lambda: ((), ()))
        self.device, self.batch_queue, self.num_steps = Device(), deque[tuple[Any, Any]](), 0
        self.add_request = self.scheduler.add_request

    def step_fn(self) -> tuple[Any, bool]:
        step = self.scheduler.schedule()
        self.num_steps += 1
        self.batch_queue.append((step, self.device.run(step)))
        if len(self.batch_queue) == 1:
            return None, True
        return self.scheduler.update_from_output(*self.batch_queue.popleft()), True

    def post_step(self, ran: bool) -> None: ...

    def abort_requests(self, names: list[str]) -> None: ...


waits = pytest.mark.parametrize(
    ("step_s", "least", "most"), [(0.0, 1.5, 3.5), (3600.0, 4.0, 5.0)], ids=["at once", "waits"]
)


@waits
def test_a_step_that_is_planned_when_drafts_have_come_commits_more(
    tiny_vllm: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, least: float, most: float
) -> None:
    """`step_s`: what a step usually takes. A right draft comes while a step runs: before the next one is planned, or,
    where nobody waits, after it."""
    monkeypatch.setattr(StepCost, "step_s", step_s)
    core, prompt, asked = Core(tiny_vllm, plugin=False), [1, 2, 3] * 4, 90
    limits = Limits(VOCAB, 1000, BLOCK, 1000, 4)
    bench = WorkerBench(limits, lambda clock: TargetWorker(VllmEngine(core), limits, clock))
    bench.open(0, opening(prompt, max_new_tokens=asked))
    tokens, told, coming = bench.tokens[key(0)], len(prompt), list[int]()
    while bench.worker.load.num_sequences:
        bench.step()
        if coming:
            bench.offer(0, told, coming)
        coming = continued(tokens, 2 * NUM_DRAFTED + 1) if len(tokens) > told else []
        told = len(tokens)
        assert core.num_steps < 2 * asked
    assert tokens == [*prompt, *continued(prompt, asked)] and not core.scheduler.num_faults
    assert least < asked / core.num_steps < most


class Pool:
    """In the place of the thread of draft workers: right drafts, each of which comes while the next step runs."""

    def __init__(self) -> None:
        self.arrived, self.coming = list[Offered | Followed](), list[Offered]()
        self.tokens: list[int] = []
        self.num_waits = 0

    def tell(self, action: Callable[[Any], None]) -> None:
        action(self)

    def poll(self) -> list[Offered | Followed]:
        found, self.arrived, self.coming = self.arrived, self.coming, []
        return found

    def wait(self, seconds: float) -> bool:
        self.num_waits += 1
        self.arrived, self.coming = [*self.arrived, *self.coming], []
        return bool(self.arrived)

    def open(self, opened: Opened, announced: None) -> None:
        self.tokens = [*opened.spec.prompt]
        self.arrived.append(Followed(opened.key))
        self._answer(opened.key)

    def step(self, report: TargetReport) -> None:
        for row in report.commits:
            self.tokens += row.token_ids
            self._answer(row.key)

    def _answer(self, key: SequenceKey) -> None:
        self.coming = [Offered(key, DraftTree(len(self.tokens), tuple(continued(self.tokens, 2 * NUM_DRAFTED + 1))))]


@waits
def test_so_it_does_in_vllm_serve(
    tiny_vllm: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, least: float, most: float
) -> None:
    monkeypatch.setattr(StepCost, "step_s", step_s)
    core, prompt, asked, pool = Core(tiny_vllm, plugin=True), [1, 2, 3] * 4, 90, Pool()
    core.scheduler.feed._pool = pool
    core.scheduler.add_request(new_request("one", prompt, asked))
    while core.scheduler.has_requests():
        core.step_fn()
        assert core.num_steps < 2 * asked
    assert pool.tokens == [*prompt, *continued(prompt, asked)] and not core.scheduler.num_faults
    assert least < asked / core.num_steps < most
    assert bool(pool.num_waits) == bool(step_s)


@pytest.mark.parametrize(("planning_s", "by_s"), [(0.1, 0.5), (0.4, 0.2), (0.6, -0.2)])
def test_a_plan_that_takes_long_begins_sooner(
    tiny_vllm: Path, monkeypatch: pytest.MonkeyPatch, planning_s: float, by_s: float
) -> None:
    """Of a step of a second."""
    scheduler = Core(tiny_vllm, plugin=True).scheduler
    assert scheduler.plan_by_s == 0.0, "no step runs"
    scheduler.add_request(new_request("one", [1, 2, 3], 9))
    scheduler.schedule()
    monkeypatch.setattr(StepCost, "step_s", 1.0)
    scheduler._planning_s = planning_s
    assert scheduler.plan_by_s - scheduler._ended_s == pytest.approx(by_s)
