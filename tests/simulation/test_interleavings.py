"""Interleavings that a random schedule hardly meets, made on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from outrider.metadata.tenants.ledger import TenantUsage
from outrider.rpc.v1 import router_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sim.clock import VirtualLoop, run_virtually
from outrider_controller.router.request.failover import Fault

from tests.fakes import fake_info
from tests.simulation import draw
from tests.simulation.client import Answer, Clients
from tests.simulation.network import Channel, _error
from tests.simulation.processes import RouterProcess
from tests.simulation.schedule import RequestPlan, Role, WorkerPlan
from tests.simulation.witness import ROUTE_PATH
from tests.simulation.world import World

TARGET = WorkerPlan(step_s=0.01, token_s=0.0001, num_blocks=60, max_sequences=16)
REQUEST = RequestPlan(
    number=0,
    at_s=0.0,
    prompt=(1, 2, 3),
    max_tokens=28,
    temperature=0.0,
    top_k=0,
    seed=None,
    stop_token_ids=(),
    speculation=router_pb2.SPECULATION_MODE_OFF,
    max_draft_tokens=None,
    timeout_s=60.0,
)


def run(test: Callable[[World, Clients], Awaitable[None]], num_targets: int = 1, num_routers: int = 1) -> None:
    """In a world of such a size without drafts and faults."""
    schedule = replace(
        draw(0), targets=(TARGET,) * num_targets, drafts=(), num_routers=num_routers, requests=(REQUEST,), faults=()
    )

    async def within_world() -> None:
        async with World(schedule, None) as world:
            await test(world, Clients(world))

    run_virtually(within_world(), VirtualLoop())


def routers(world: World) -> list[RouterProcess]:
    return [process for process in world.processes(Role.ROUTER) if isinstance(process, RouterProcess)]


async def committed(world: World, count: int) -> None:
    """Returns once targets have committed so many tokens; the last are on their way."""
    while world.witness.counts["committed"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)


def test_what_a_target_refuses_is_opened_on_no_other_whatever_woke_the_request_before() -> None:
    async def refused_after_a_wake(world: World, clients: Clients) -> None:
        asking: asyncio.Task[Answer] = asyncio.create_task(clients.ask(REQUEST))
        await committed(world, 5)
        dispatcher = routers(world)[0].dispatcher
        [active] = dispatcher.table.requests
        # As it does when a draft has room.
        active.events.wake()
        dispatcher._target_refused(active, sequence.SequenceError(code=3, reason="INVALID_ARGUMENT", message="no"))
        answer = await asking
        assert answer.error is not None and answer.error.reason == "INVALID_ARGUMENT"
        assert world.witness.counts["openings"] == 1

    run(refused_after_a_wake, num_targets=2)


@pytest.mark.parametrize("count", [1, 5])
def test_an_answer_that_moves_off_a_router_that_goes_on_is_billed_once(count: int) -> None:
    """The gateway loses the stream, before or after it has a token. That router does not hear of it, and comes to the
    answer's end too."""

    async def half_broken(world: World, clients: Clients) -> None:
        asking: asyncio.Task[Answer] = asyncio.create_task(clients.ask(REQUEST))
        await committed(world, count)
        [stream] = [each for each in world.gateway.streams if each.path == ROUTE_PATH]
        stream._client_learns("connection reset")
        answer = await asking
        assert len(answer.token_ids) == REQUEST.max_tokens
        # The routers get new requests in turn, both of them once the loss is forgotten.
        await asyncio.sleep(3)
        for number in (1, 2):
            await clients.ask(replace(REQUEST, number=number))
        bill = TenantUsage()
        for router in routers(world):
            for usage in router.dispatcher.usage.sums.values():
                bill.add(usage)
        assert (bill.requests, bill.prompt_tokens) == (3, 3 * len(REQUEST.prompt))
        assert bill.output_tokens == 3 * REQUEST.max_tokens

    run(half_broken, num_routers=2)


def test_a_router_that_reaches_no_target_leaves_its_requests_to_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both reach the metadata store, and the target renews its lease."""

    async def cut_off(world: World, clients: Clients) -> None:
        alone, other = routers(world)
        for each in (alone, other):
            info = fake_info(worker.WORKER_ROLE_ROUTER, worker_id=each.host.name)
            world.store.register(each.host, info, each.address, worker.WorkerLoad)
        reached = Channel._reached

        async def unless_cut_off(channel: Channel) -> Any:
            if channel.client is alone.host:
                raise _error(grpc.StatusCode.UNAVAILABLE, "no route")
            return await reached(channel)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(clients.ask(replace(REQUEST, number=number))) for number in range(2)]
            await committed(world, 20)
            monkeypatch.setattr(Channel, "_reached", unless_cut_off)
            for stream in [each for each in alone.host.streams if each.client is alone.host]:
                stream.break_off("no route")
        await asyncio.sleep(3)
        new = [await clients.ask(replace(REQUEST, number=number)) for number in range(2, 6)]
        assert [answer.end for answer in (*(each.result() for each in running), *new)] == ["length"] * 6
        assert max(answer.ended_s - answer.started_s for answer in new) < 1

    run(cut_off, num_routers=2)


def test_what_a_target_still_commits_of_an_answer_that_has_moved_is_not_billed() -> None:
    async def moved(world: World, clients: Clients) -> None:
        asking: asyncio.Task[Answer] = asyncio.create_task(clients.ask(REQUEST))
        await committed(world, 5)
        await asyncio.sleep(TARGET.step_s * 0.9)
        [router] = routers(world)
        [active] = router.dispatcher.table.requests
        router.dispatcher._lose_target(active, "an operator drains it", Fault.LEAVING)
        answer = await asking
        assert len(answer.token_ids) == REQUEST.max_tokens < world.witness.counts["committed"]
        [bill] = router.dispatcher.usage.sums.values()
        assert bill.output_tokens == REQUEST.max_tokens

    run(moved, num_targets=2)
