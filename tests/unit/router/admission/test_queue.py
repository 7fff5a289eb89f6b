"""Who waits for a place, until when, and what those hear that get none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from outrider.errors import Code, Overloaded
from outrider.gateway.routers.routers import Rotation
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sim.clock import VirtualLoop, run_virtually
from outrider_controller.router.admission.queue import AdmissionQueue
from outrider_controller.router.config import AdmissionConfig
from outrider_controller.router.fleet.fleet import TargetLink
from outrider_controller.router.fleet.loads import WorkerLoads
from outrider_controller.router.observe.telemetry import RouterTelemetry
from prometheus_client import CollectorRegistry

from tests.unit.router.made_requests import a_request


class NoEvents:
    async def emit(self, kind: str, fields: Mapping[str, str | int | float | bool]) -> None: ...


@dataclass(frozen=True)
class Target:
    info: worker.WorkerInfo
    load: worker.WorkerLoad = field(default_factory=worker.WorkerLoad)
    open_sequences: set[int] = field(default_factory=set)

    @property
    def worker_id(self) -> str:
        return self.info.worker_id


@dataclass
class Fleet:
    """Targets with so many places each."""

    places: list[int]
    elsewhere: int = 0
    leaving: int = 0
    num_routers: int = 1
    num_blocks: int = 0
    free_blocks: int = 0
    """As each target reports."""

    def live_targets(self, model: str) -> list[TargetLink]:
        blocks = {"num_blocks": self.num_blocks, "block_size": 10}
        infos = (
            worker.WorkerInfo(worker_id=str(number), max_sequences=count, **blocks)
            for number, count in enumerate(self.places)
        )
        return [cast(TargetLink, Target(info)) for info in infos]

    @property
    def loads(self) -> WorkerLoads:
        loads, targets = WorkerLoads(1), self.live_targets("m")
        load = worker.WorkerLoad(num_running=self.elsewhere, num_free_blocks=self.free_blocks)
        loads.report([LeaseRecord(target.info, load, "host:1", pid=1, age_ms=0) for target in targets], ())
        loads.count_elsewhere(targets)
        loads.num_routers = self.num_routers
        return loads

    def num_leaving(self, model: str) -> int:
        return self.leaving


@dataclass
class Router:
    """An admission queue, and what became of each request."""

    queue: AdmissionQueue
    registry: CollectorRegistry
    refusals: list[tuple[str, float, Overloaded]] = field(default_factory=list)
    """By tenant, with the time that it took."""
    done: list[str] = field(default_factory=list)
    num_accepted: int = 0

    async def ask(self, tenant: str = "t", seconds: float = 1.0, deadline_s: float | None = None, **more: Any) -> None:
        started_s = asyncio.get_running_loop().time()
        request = a_request(tenant=tenant, expected_tokens=97, **more)
        try:
            async with self.queue.place(request, deadline_s, self._accepted):
                await asyncio.sleep(seconds)
            self.done.append(tenant)
        except Overloaded as refused:
            self.refusals.append((tenant, asyncio.get_running_loop().time() - started_s, refused))

    def _accepted(self) -> None:
        self.num_accepted += 1

    def asks(self, times: int, tenant: str = "t", **more: Any) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.ask(tenant, **more)) for _ in range(times)]

    @property
    def held(self) -> tuple[int, int]:
        return self.queue.num_running, self.queue.num_waiting

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def router(fleet: Fleet, **config: Any) -> Router:
    registry = CollectorRegistry()
    telemetry = RouterTelemetry(registry, NoEvents())
    return Router(AdmissionQueue(AdmissionConfig(**config), fleet, telemetry), registry)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs it in virtual time."""
    run = lambda: run_virtually(test(), VirtualLoop())  # noqa: E731
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_who_finds_no_place_waits_for_one() -> None:
    one = router(Fleet([1, 1]))
    tasks = one.asks(6)
    await asyncio.sleep(0)
    assert one.held == (2, 4)
    assert one.num_accepted == 6
    assert one.value("outrider_admission_queue_length", tenant="t", model_name="m") == 4
    await asyncio.gather(*tasks)
    assert (one.held, len(one.done)) == ((0, 0), 6)
    assert one.value("outrider_admission_queue_length", tenant="t", model_name="m") == 0
    # Two at once, two after a second, two after two.
    assert one.value("outrider_admission_queue_seconds_sum", tenant="t") == pytest.approx(6)


@virtual
async def test_whom_nobody_could_serve_in_time_is_refused_at_once_with_the_time_until_it_may_be() -> None:
    one = router(Fleet([2]), queue_timeout_s=10)
    await asyncio.gather(*one.asks(2))
    tasks = one.asks(100)
    await asyncio.sleep(0)
    # Two a second, and half of ten seconds: ten wait.
    assert one.held == (2, 10)
    assert len(one.refusals) == 88 and all(took_s == 0 for _, took_s, _ in one.refusals)
    error = one.refusals[0][2]
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED")
    # Ten wait, and it would be the eleventh.
    assert error.retry_after_s == pytest.approx(5.5)
    await asyncio.gather(*tasks)
    assert len(one.refusals) == 88
    # Nobody who is refused at once was accepted before.
    assert one.num_accepted == len(one.done) == 14


@virtual
async def test_who_is_refused_by_full_targets_is_told_when_a_place_becomes_free() -> None:
    one = router(Fleet([2]))
    await asyncio.gather(*one.asks(2, seconds=4))
    tasks = one.asks(2, seconds=4)
    await asyncio.sleep(0)
    # Nobody waits; one of two ends every other second.
    assert one.queue.retry_after_s(a_request(tenant="new")) == pytest.approx(2)
    await asyncio.gather(*tasks)


@virtual
async def test_a_request_waits_half_of_its_deadline() -> None:
    one = router(Fleet([1]), queue_timeout_s=10)
    holding = one.asks(1, seconds=60)
    await asyncio.gather(*one.asks(1, deadline_s=2.0), *one.asks(1, deadline_s=0.5), *one.asks(1))
    took_s = sorted(took_s for _, took_s, _ in one.refusals)
    assert took_s == pytest.approx([0.25, 1.0, 10.0])
    assert {error.reason for *_, error in one.refusals} == {"QUEUE_TIMEOUT"}
    assert all(error.retry_after_s for *_, error in one.refusals)
    await asyncio.gather(*holding)
    assert one.held == (0, 0)


@virtual
async def test_a_client_that_leaves_frees_its_place_and_its_turn() -> None:
    one = router(Fleet([1]))
    holding, leaving, last = one.asks(1, seconds=60) + one.asks(1) + one.asks(1)
    await asyncio.sleep(1)
    for task in (leaving, holding):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await asyncio.sleep(0)
    assert one.held == (1, 0)
    await last
    assert one.held == (0, 0)


@virtual
async def test_a_full_queue_makes_room_for_a_tenant_that_has_less_in_it() -> None:
    one = router(Fleet([1]), max_queued=3)
    tasks = one.asks(4, "greedy") + one.asks(1, "quiet")
    await asyncio.sleep(0)
    assert one.held == (1, 3)
    tasks += one.asks(1, "greedy")
    await asyncio.gather(*tasks)
    assert [tenant for tenant, *_ in one.refusals] == ["greedy", "greedy"]
    assert "quiet" in one.done


@virtual
async def test_what_another_router_had_begun_does_not_wait() -> None:
    one = router(Fleet([1]))
    tasks = one.asks(2) + one.asks(1, "moved", committed=(5,))
    await asyncio.sleep(0)
    assert one.held == (2, 1)
    await asyncio.gather(*tasks)
    assert one.done[:2] == ["t", "moved"]


@virtual
async def test_tokens_that_a_client_resumes_with_take_it_past_nobody() -> None:
    one = router(Fleet([1]))
    tasks = one.asks(2) + one.asks(1, "resumes", committed=(5,), num_resumed_by_client=1)
    await asyncio.sleep(0)
    assert one.held == (1, 2)
    await asyncio.gather(*tasks)
    assert one.done == ["t", "t", "resumes"]
    new, resumed = a_request(prompt=(1, 5)), a_request(prompt=(1,), committed=(5,), num_resumed_by_client=1)
    assert new.cost == resumed.cost


@virtual
async def test_places_that_other_routers_have_taken_are_not_there() -> None:
    fleet = Fleet([4], elsewhere=3)
    one = router(fleet)
    tasks = one.asks(3)
    await asyncio.sleep(0)
    assert one.held == (1, 2)
    fleet.elsewhere = 2
    one.queue.fleet_changed()
    assert one.held == (2, 1)
    await asyncio.gather(*tasks)


@virtual
async def test_what_runs_at_a_target_that_drains_takes_no_place_at_the_others() -> None:
    fleet = Fleet([2, 2])
    one = router(fleet)
    tasks = one.asks(6)
    await asyncio.sleep(0)
    assert one.held == (4, 2)
    fleet.places, fleet.leaving = [2], 2
    one.queue.fleet_changed()
    assert one.held == (4, 2)
    fleet.places = [2, 2]
    one.queue.fleet_changed()
    assert one.held == (6, 0)
    await asyncio.gather(*tasks)


@virtual
async def test_where_no_target_is_left_whoever_waits_is_let_go_to_look_for_one() -> None:
    fleet = Fleet([1])
    one = router(fleet)
    tasks = one.asks(5)
    await asyncio.sleep(0)
    fleet.places = []
    one.queue.fleet_changed()
    assert one.held == (5, 0)
    await asyncio.gather(*tasks)


@virtual
async def test_a_router_carries_no_more_than_it_may_however_large_the_fleet_is() -> None:
    one = router(Fleet([0, 100]), max_sessions=3)
    tasks = one.asks(5)
    await asyncio.sleep(0)
    assert one.held == (3, 2)
    await asyncio.gather(*tasks)


@virtual
async def test_who_would_find_no_room_in_a_kv_cache_waits_here_where_turns_are_fair() -> None:
    """Each request takes 100 tokens, 97 of them its answer's."""
    one = router(Fleet([50], num_blocks=40))
    tasks = one.asks(6)
    await asyncio.sleep(0)
    assert one.held == (4, 2)
    await asyncio.gather(*tasks)
    assert one.held == (0, 0)


@virtual
async def test_requests_that_share_a_prefix_take_what_the_target_says_they_take() -> None:
    fleet = Fleet([50], num_blocks=40)
    one = router(fleet, queue_timeout_s=1000.0)
    tasks = one.asks(12, seconds=60)
    await asyncio.sleep(5)
    assert one.held == (4, 8)
    # They hold a tenth of what was thought; their answers may yet grow.
    fleet.free_blocks = 38
    one.queue.fleet_changed()
    assert one.held == (5, 7)
    await asyncio.sleep(5)
    one.queue.fleet_changed()
    assert one.held == (6, 6)
    await asyncio.gather(*tasks)


@virtual
async def test_shares_hold_over_several_routers() -> None:
    """Two routers before one target of 20 places. Each knows of the other what the target reports, a second later."""
    rotation = Rotation()
    fleets = {name: Fleet([20], num_routers=2) for name in ("one", "other")}
    one, other = router(fleets["one"]), router(fleets["other"])
    routers = {"one": one, "other": other}

    async def client(tenant: str, weight: float) -> None:
        while True:
            await routers[rotation.choose(routers, 0.0, tenant) or ""].ask(tenant, 0.5, weight=weight)
            # Who is refused asks again.
            await asyncio.sleep(0.05)

    async def report() -> None:
        while True:
            await asyncio.sleep(1)
            fleets["one"].elsewhere, fleets["other"].elsewhere = other.held[0], one.held[0]
            one.queue.fleet_changed()
            other.queue.fleet_changed()

    clients = [client(*who) for who in (("double", 2.0), ("single", 1.0)) for _ in range(40)]
    tasks = [asyncio.create_task(work) for work in (*clients, report())]
    await asyncio.sleep(60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    done = Counter(one.done + other.done)
    assert done["double"] / done["single"] == pytest.approx(2, rel=0.15)
    assert done.total() > 0.9 * 60 * 20 / 0.5
