"""Workers that an operator cordons or drains: what runs there, and what is sent there."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2
from outrider.rpc.v1 import router_pb2 as router

from tests.fakes import FakeDraft, FakeTarget, continuation
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Fleet, control_plane

PROMPT = [5, 6, 7]


async def known_to_the_router(fleet: Fleet, worker_id: str) -> None:
    router = fleet.router
    assert router is not None
    await until(lambda: worker_id in router.dispatcher.fleet.loads.cordons)


def check_text(tokens: list[int]) -> None:
    assert tokens == continuation(PROMPT, len(tokens), 1000)


async def test_a_cordoned_target_finishes_what_it_has_and_gets_nothing_new(fleet: Fleet) -> None:
    first = await fleet.target(FakeTarget(step_s=0.005))
    await fleet.start()
    running = asyncio.create_task(fleet.ask(fleet.request(PROMPT, 300)))
    await until(lambda: first.live)
    second = await fleet.target(FakeTarget(step_s=0.005))
    async with control_plane(fleet) as control:
        cordoned = await control.CordonWorker(
            control_pb2.CordonWorkerRequest(worker_id=first.info.worker_id, reason="a fan is loud")
        )
        assert (cordoned.worker.cordon.reason, cordoned.worker.cordon.by) == ("a fan is loud", "local")
        await known_to_the_router(fleet, first.info.worker_id)
        await until(lambda: len(fleet.router.dispatcher.fleet.live_targets("simulated")) == 1)  # type: ignore[union-attr]
        for _ in range(5):
            check_text((await fleet.ask(fleet.request(PROMPT, 5))).token_ids)
        first.step_s = 0.001
        answer = await running
        check_text(answer.token_ids)
        assert (len(answer.token_ids), answer.metrics.num_target_failovers) == (300, 0)
        assert (len(first.opens), len(second.opens)) == (1, 5)
        undone = await control.UncordonWorker(control_pb2.UncordonWorkerRequest(worker_id=first.info.worker_id))
        assert undone.was_cordoned
        again = await control.UncordonWorker(control_pb2.UncordonWorkerRequest(worker_id=first.info.worker_id))
        assert not again.was_cordoned
    await until(lambda: not fleet.router.dispatcher.fleet.loads.cordons)  # type: ignore[union-attr]
    audited = [entry.fields["action"] for entry in await fleet.store.tenants.audit()]
    assert audited == ["uncordon worker", "uncordon worker", "cordon worker"]


async def test_a_drained_target_hands_its_requests_over_once_another_can_go_on_with_them(fleet: Fleet) -> None:
    first = await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start()
    running = asyncio.create_task(fleet.ask(fleet.request(PROMPT, 300)))
    await until(lambda: first.live)
    async with control_plane(fleet) as control:
        await control.DrainWorker(control_pb2.DrainWorkerRequest(worker_id=first.info.worker_id, grace_s=0))
        await known_to_the_router(fleet, first.info.worker_id)
        # There is no other: it stays, and its client sees nothing of it.
        await asyncio.sleep(0.3)
        assert first.live
        second = await fleet.target(FakeTarget(step_s=0.001))
        await until(lambda: second.live and not first.live)
        answer = await running
        check_text(answer.token_ids)
        assert (len(answer.token_ids), answer.metrics.num_target_failovers) == (300, 1)
        drained = control_pb2.GetWorkerRequest(worker_id=first.info.worker_id)
        async with asyncio.timeout(60):
            while not (await control.GetWorker(drained)).worker.cordon.drained_unix_ms:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    told = [event.kind for event in await fleet.store.events() if event.fields.get("role") == "target"]
    assert [kind for kind in told if kind != "worker_joined"] == ["worker_cordoned", "worker_drained"]


async def test_a_request_goes_back_to_a_target_that_is_in_use_again(fleet: Fleet) -> None:
    """As when each target is drained, looked after and uncordoned in turn."""
    targets = [await fleet.target(FakeTarget(step_s=0.05)) for _ in range(2)]
    cordons = (await fleet.start()).dispatcher.fleet.loads
    running = asyncio.create_task(fleet.ask(fleet.request(PROMPT, 400), timeout=60))
    await until(lambda: any(target.live for target in targets))
    targets.sort(key=lambda target: not target.live)
    async with control_plane(fleet) as control:
        for one, other in (targets, targets[::-1]):
            await control.DrainWorker(control_pb2.DrainWorkerRequest(worker_id=one.info.worker_id, grace_s=0))
            await until(lambda: other.live and not one.live)  # noqa: B023
            await control.UncordonWorker(control_pb2.UncordonWorkerRequest(worker_id=one.info.worker_id))
            await until(lambda: not cordons.cordons)
        for target in targets:
            target.step_s = 0.001
        answer = await running
    check_text(answer.token_ids)
    assert (len(answer.token_ids), answer.metrics.num_target_failovers) == (400, 2)


async def test_requests_leave_a_drained_draft_at_once_for_another_or_for_plain_decoding(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.05))
    first = await fleet.draft(FakeDraft())
    await fleet.start()
    request = fleet.request(PROMPT, 500, speculation=router.SPECULATION_MODE_ON)
    running = asyncio.create_task(fleet.ask(request, timeout=60))
    await until(lambda: first.live)
    async with control_plane(fleet) as control:
        await control.DrainWorker(control_pb2.DrainWorkerRequest(worker_id=first.info.worker_id, grace_s=3600))
        await until(lambda: not first.live)
        second = await fleet.draft(FakeDraft())
        await until(lambda: second.live)
        target.step_s = 0.001
        answer = await running
    check_text(answer.token_ids)
    assert len(answer.token_ids) == 500 and len(first.opens) == 1
    assert answer.metrics.num_draft_failovers == 1


async def test_an_answer_of_real_workers_is_the_same_when_its_target_and_draft_are_drained(real_fleet: Fleet) -> None:
    asked = {"model": "tiny", "speculation": router.SPECULATION_MODE_ON}
    plain = await real_fleet.ask(real_fleet.request([40, 41, 42, 43], 400, model="tiny"))
    running = asyncio.create_task(real_fleet.ask(real_fleet.request([40, 41, 42, 43], 400, **asked)))
    assert real_fleet.router is not None
    targets = real_fleet.router.dispatcher.fleet.targets
    await until(lambda: any(link.open_sequences for link in targets.values()))
    drained = next(link.worker_id for link in targets.values() if link.open_sequences)
    (draft_id,) = real_fleet.router.dispatcher.fleet.drafts
    async with control_plane(real_fleet) as control:
        for worker_id in (drained, draft_id):
            await control.DrainWorker(control_pb2.DrainWorkerRequest(worker_id=worker_id, grace_s=0))
        await known_to_the_router(real_fleet, drained)
        await until(lambda: not targets[drained].open_sequences)
        answer = await running
    assert answer.token_ids == plain.token_ids
    assert answer.metrics.num_target_failovers == 1


async def test_a_cordon_outlives_its_control_plane_and_a_lease_that_lapses(fleet: Fleet) -> None:
    target = await fleet.target()
    async with control_plane(fleet) as control:
        await control.CordonWorker(control_pb2.CordonWorkerRequest(worker_id=target.info.worker_id))
    async with control_plane(fleet) as control:
        found = (await control.GetWorker(control_pb2.GetWorkerRequest(worker_id=target.info.worker_id))).worker
        assert found.HasField("cordon")

    async def read() -> LeaseRecord:
        return next(record for record in await fleet.store.workers() if record.info == target.info)

    assert not (await read()).takes_work
    async with fleet.store.register(target.info, target.address, lambda: target.load):
        assert not (await read()).takes_work


async def test_what_cannot_be_cordoned_is_refused_by_field(fleet: Fleet) -> None:
    async with control_plane(fleet) as control:
        (itself,) = (await control.ListWorkers(control_pb2.ListWorkersRequest())).workers
        for worker_id, reason, refused, field in (
            ("nobody", "", "UNKNOWN_WORKER", "worker_id"),
            ("", "", "INVALID_FIELD", "worker_id"),
            ("\x07", "", "INVALID_FIELD", "worker_id"),
            ("?", "x" * 201, "INVALID_FIELD", "reason"),
            (itself.info.worker_id, "", "NOT_CORDONABLE", "worker_id"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await control.CordonWorker(control_pb2.CordonWorkerRequest(worker_id=worker_id, reason=reason))
            error = from_rpc_error(caught.value)
            assert (error.reason, error.field) == (refused, field)
