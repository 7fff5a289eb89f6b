"""One plan for routers and control planes, over real gRPC and Redis, with workers that are fakes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import redis
from outrider.metadata.leader import LeaderLease
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, policy_pb2, router_pb2, tenants_pb2
from outrider.runtime.supervision import stop
from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TenantPolicy, TenantSetting
from outrider_controller.router.process import RunningRouter

from tests.fakes import FakeDraft, serving_draft
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import control_plane
from tests.planning import plan_leader

ON, OFF, AUTO = (
    tenants_pb2.SPECULATION_SETTING_ON,
    tenants_pb2.SPECULATION_SETTING_OFF,
    tenants_pb2.SPECULATION_SETTING_AUTO,
)
MODEL = "simulated"


def decision(router: RunningRouter, tenant: str = "t") -> Decision:
    return router.dispatcher.policy.decision(tenant, MODEL)


def follows(router: RunningRouter) -> bool:
    return router.dispatcher.policy.led


def show(router: RunningRouter, draft: Any, saving: float, rounds: int = 200, tenant: str = "t") -> None:
    """As if requests of the tenant had made such rounds."""
    record = router.dispatcher.policy.record(tenant, MODEL, draft.info)
    record.evidence.add_rounds(rounds=rounds, tokens=2 * rounds, saved=saving * rounds)


async def test_a_tenant_whose_drafts_never_pay_is_off_on_every_router_and_after_the_control_plane(fleet: Any) -> None:
    await fleet.target()
    draft = await fleet.draft()
    async with AsyncExitStack() as first_life:
        stub = await first_life.enter_async_context(control_plane(fleet))
        router = await fleet.start()
        await until(lambda: follows(router))

        def costs() -> bool:
            show(router, draft, -0.8)
            return decision(router).mode is Mode.TRY

        await until(costs)
        second = await fleet.start()
        assert follows(second)
        assert (decision(second).mode, decision(second).reason) == (Mode.TRY, Reason.COSTS)
        # Of a hundred requests hardly one tries.
        answers = [await fleet.ask(fleet.request(request_id=f"r{n}", max_new_tokens=4)) for n in range(20)]
        assert sum(answer.metrics.num_spec_steps > 0 for answer in answers) <= 3
        explained = await stub.Explain(control_pb2.ExplainRequest(tenant="t"))
        assert explained.known
        assert [(one.target, one.reason) for one in explained.decisions] == [(MODEL, "costs")]
        assert explained.decisions[0].upper < 0
    await until(lambda: not follows(second))
    assert decision(second).mode is Mode.TRY
    async with control_plane(fleet) as stub:
        third = await fleet.start()
        await until(lambda: follows(third))
        assert decision(third).mode is Mode.TRY
        explained = await stub.Explain(control_pb2.ExplainRequest(tenant="t"))
        assert explained.known


async def test_routers_follow_who_leads_first_in_an_empty_store_though_they_have_seen_higher_epochs(
    fleet: Any, metadata_url: str
) -> None:
    await fleet.target()
    await fleet.draft()
    for holder in ("a", "b", "c"):
        await fleet.store.plans.lease(holder).hold()
        await fleet.store.plans.lease(holder).resign()
    async with control_plane(fleet):
        router = await fleet.start()
        await until(lambda: follows(router))
    await until(lambda: not follows(router))
    keys = fleet.store.plans._keys
    with redis.Redis.from_url(metadata_url) as raw:
        raw.delete(keys.leader_epoch, keys.leader, keys.plan)
    async with control_plane(fleet) as stub:
        await until(lambda: follows(router))
        await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="t", setting=OFF))
        await until(lambda: decision(router).reason is Reason.OPERATOR_OFF)


async def test_what_an_operator_says_reaches_running_sequences_and_ends_by_itself(fleet: Any) -> None:
    target = await fleet.target()
    await fleet.draft()
    target.step_s = 0.01
    async with control_plane(fleet) as stub:
        router = await fleet.start()
        await until(lambda: follows(router))
        call = fleet.call(fleet.request(max_new_tokens=3000), timeout=60)
        drafted = asyncio.create_task(_drafted(call))
        async with asyncio.timeout(60):
            while not drafted_of(router):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="t", setting=OFF, ttl_ms=1500))
        # A draft may rest for other reasons too.
        await until(lambda: decision(router).reason is Reason.OPERATOR_OFF and not drafted_of(router))
        await until(lambda: drafted_of(router))
        assert decision(router).reason is not Reason.OPERATOR_OFF
        await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="t", setting=ON, max_draft_tokens=2))
        await until(lambda: drafted_of(router) == 2)
        drafted.cancel()
        for wrong, where in (
            (control_pb2.SetSpeculationRequest(tenant="no name", setting=ON), "tenant"),
            (control_pb2.SetSpeculationRequest(tenant="t"), "setting"),
            (control_pb2.SetSpeculationRequest(tenant="t", setting=ON, max_draft_tokens=99), "max_draft_tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.SetSpeculation(wrong)
            assert from_rpc_error(caught.value).field == where


@pytest.mark.parametrize("decided", [TenantSetting.ON, TenantSetting.OFF])
async def test_a_request_follows_what_is_decided_while_its_workers_are_looked_for(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, decided: TenantSetting
) -> None:
    await fleet.target()
    await fleet.draft()
    router = await fleet.start()
    dispatcher, cell = router.dispatcher, Cell("t", MODEL)
    search = dispatcher.picker.target

    def decide(setting: TenantSetting) -> None:
        policy = TenantPolicy(speculation=setting)
        dispatcher.policy.decisions[cell] = Decision(Mode.ON, Reason.SAVES, saving=0.5, policy=policy)
        dispatcher.settings_sender.plan_changed({cell})

    async def decides(*args: Any) -> Any:
        found = await search(*args)
        decide(decided)
        return found

    monkeypatch.setattr(dispatcher.picker, "target", decides)
    decide(TenantSetting.OFF if decided is TenantSetting.ON else TenantSetting.ON)
    answer = await fleet.ask(fleet.request(max_new_tokens=300))
    assert bool(answer.metrics.num_draft_tokens) is (decided is TenantSetting.ON)


def drafted_of(router: RunningRouter) -> int:
    """Most drafted tokens a step that the running request is allowed now."""
    return max((active.speculation.sent.max_draft_tokens for active in router.dispatcher.table.requests), default=0)


async def _drafted(call: Any) -> None:
    async for _ in call:
        pass


async def test_without_a_control_plane_a_router_plans_by_itself(fleet: Any) -> None:
    await fleet.target()
    draft = await fleet.draft()
    router = await fleet.start()

    def costs() -> bool:
        show(router, draft, -0.8)
        return decision(router).mode is Mode.TRY

    await until(costs)
    assert not follows(router)
    assert decision(router, "somebody else").mode is Mode.TRY


async def test_rounds_that_were_meant_for_a_draft_with_no_room_are_told(fleet: Any) -> None:
    target = await fleet.target()
    target.step_s = 0.01
    await fleet.draft(FakeDraft(max_sequences=1))
    router = await fleet.start()
    await until(lambda: bool(decision(router).draft_shares))
    calls = [fleet.call(fleet.request(max_new_tokens=4000), timeout=60) for _ in range(2)]
    reading = [asyncio.create_task(_drafted(call)) for call in calls]
    told: list[float] = []

    def missed() -> bool:
        told.extend(evidence.missed for evidence in router.dispatcher.policy.evidence().values())
        return any(told)

    # By a control plane that is not there: nobody else asks.
    router.dispatcher.policy.led = True
    await until(missed)
    for task in reading:
        task.cancel()


async def test_the_first_request_on_a_new_router_and_after_a_drafts_restart_is_in_its_tenants_mode(fleet: Any) -> None:
    await fleet.store.tenants.put([tenants_pb2.Tenant(name="u", weight=8)], by="test")
    target, draft = await fleet.target(), FakeDraft()

    async def first_of(tenant: str) -> Any:
        """How its target was told to speculate when it opened the request."""
        # None of the few that try, where drafts cost.
        request_id = next(f"{n}" for n in range(100) if decision(router, "t").draft_for(f"{n}") is None)
        await fleet.ask(fleet.request(request_id=request_id, tenant=tenant, max_new_tokens=4))
        return target.opens[-1]

    async with control_plane(fleet):
        async with serving_draft(draft), fleet.store.register(draft.info, draft.address, lambda: draft.load):
            router = await fleet.start()
            await until(lambda: follows(router) and bool(router.dispatcher.fleet.drafts))

            def costs() -> bool:
                show(router, draft, -0.8)
                show(router, draft, 0.8, tenant="u")
                return (decision(router).mode, decision(router, "u").reason) == (Mode.TRY, Reason.SAVES)

            await until(costs)
            router = await fleet.start()
            plain, drafted = await first_of("t"), await first_of("u")
            assert (plain.speculation.max_draft_tokens, plain.draft.address) == (0, "")
            assert drafted.speculation.max_draft_tokens > 0
            assert drafted.draft.worker_id == draft.info.worker_id
            # Nothing is said of its speculation: a saved token is worth as much as its weight, within bounds.
            assert drafted.speculation.weight == 2
        await until(lambda: not any(one.leased for one in router.dispatcher.fleet.drafts.values()))
        again = await fleet.draft(FakeDraft())
        await until(lambda: any(one.leased for one in router.dispatcher.fleet.drafts.values()))
        plain, drafted = await first_of("t"), await first_of("u")
        assert (plain.speculation.max_draft_tokens, plain.draft.address) == (0, "")
        assert drafted.speculation.max_draft_tokens > 0
        assert drafted.draft.worker_id == again.info.worker_id


async def test_one_leads_and_another_takes_over_where_it_ended(fleet: Any) -> None:
    store = fleet.store
    async with plan_leader(store, "a") as first, plan_leader(store, "b") as second:
        await first.tick()
        await second.tick()
        assert (first.epoch, second.epoch) == (1, 0)
        # Whoever is asked explains: one that stands by, by what the leader wrote of the targets that live.
        await fleet.target()
        told = policy_pb2.TenantDecision(tenant="t", target=MODEL, reason="costs", rounds=200)
        usual = policy_pb2.TenantDecision(target=MODEL, reason="unknown")
        assert await store.plans.save(1, [told, usual])
        assert await second.explain("t") == ([told], True)
        assert await second.explain("somebody") == ([usual], False)
        with pytest.raises(Exception, match="another control plane leads"):
            second.follow()
        await fleet.store.plans.lease("a").resign()
        await second.tick()
        assert second.epoch == 2
        # What the first one writes now is too late, and it stands by.
        assert not await fleet.store.plans.save(1, [])
        await first.tick()
        assert first.epoch == 0


async def test_a_leader_that_leaves_gives_up_its_lease_and_lets_its_routers_go(fleet: Any) -> None:
    async with plan_leader(fleet.store) as leader:
        await leader.tick()
        follower, leading = leader.follow(), asyncio.create_task(leader.run())
        await asyncio.sleep(0)
        await stop(leading)
        assert (leader.epoch, follower.over) == (0, True)
        assert await fleet.store.plans.lease("b").hold() == 2


async def test_of_a_deleted_tenant_nothing_is_planned_and_a_namesake_begins_as_everybody(fleet: Any) -> None:
    await fleet.target()
    draft = await fleet.draft()
    named = [tenants_pb2.Tenant(name=name) for name in ("t", "u")]
    async with control_plane(fleet) as stub:
        router = await fleet.start()
        await until(lambda: follows(router))
        await stub.PutTenants(control_pb2.PutTenantsRequest(tenants=named))
        show(router, draft, -0.8)
        await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="t", setting=OFF))
        await until(lambda: decision(router).reason is Reason.OPERATOR_OFF)
        await stub.DeleteTenant(control_pb2.DeleteTenantRequest(name="t"))
        await until(lambda: ("t", MODEL) not in router.dispatcher.policy.decisions)
        await stub.PutTenants(control_pb2.PutTenantsRequest(tenants=named))
        explained = await stub.Explain(control_pb2.ExplainRequest(tenant="t"))
        assert not explained.known
        assert [(one.tenant, one.override.setting) for one in explained.decisions] == [("", AUTO)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="tt", setting=OFF))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_of_a_tenant_that_was_deleted_meanwhile_a_router_that_was_cut_off_keeps_no_decision(fleet: Any) -> None:
    await fleet.target()
    draft = await fleet.draft()
    await fleet.store.tenants.put([tenants_pb2.Tenant(name="t")], by="test")
    async with control_plane(fleet) as stub:
        router = await fleet.start()
        await until(lambda: follows(router))
        await stub.SetSpeculation(control_pb2.SetSpeculationRequest(tenant="t", setting=OFF))
        await until(lambda: decision(router).reason is Reason.OPERATOR_OFF)
    await until(lambda: not follows(router))
    # What the router has decided alone is its own.
    show(router, draft, -0.8, tenant="own")
    await until(lambda: ("own", MODEL) in router.dispatcher.policy.decisions)
    await fleet.store.tenants.delete("t", by="test")
    async with control_plane(fleet):
        await until(lambda: follows(router))
        assert ("t", MODEL) not in router.dispatcher.policy.decisions
        assert ("own", MODEL) in router.dispatcher.policy.decisions


async def test_a_tenant_that_is_deleted_while_settings_are_read_is_not_planned_again(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now_s = fleet.store, [100.0]
    await store.tenants.put([tenants_pb2.Tenant(name="t")], by="test")
    await store.plans.set_override("t", tenants_pb2.SpeculationOverride(setting=OFF))
    async with plan_leader(store, clock=lambda: now_s[0]) as leader:

        async def tick(after_s: float) -> None:
            now_s[0] += after_s
            await leader.tick()

        await tick(0)
        seen = policy_pb2.DraftEvidence(tenant="t", target=MODEL, draft="d", rounds=9)
        report = policy_pb2.FollowRequest(targets=[policy_pb2.TargetReport(model=MODEL, drafts=["d"])], evidence=[seen])
        follower = leader.follow()
        leader.received(follower, report)
        await tick(10)
        assert [one.removed for one in follower.pending.values() if one.tenant] == [False]
        read = store.plans.overrides

        async def read_and_deleted(epoch: int = 0) -> Any:
            found = await read(epoch)
            if found:
                await store.tenants.delete("t", by="test")
            return found

        monkeypatch.setattr(store.plans, "overrides", read_and_deleted)
        for after_s in (10, 10, 2):
            await tick(after_s)
            # What a router has sent before it knew.
            leader.received(follower, report)
        assert [one.removed for one in follower.pending.values() if one.tenant] == [True]
        assert await leader.explain("t") == (await leader.explain("nobody"))


async def test_a_clock_that_is_set_back_stops_no_plan(fleet: Any) -> None:
    now_s = [1e9]
    async with plan_leader(fleet.store, clock=lambda: now_s[0]) as leader:
        await leader.tick()
        seen = policy_pb2.DraftEvidence(tenant="t", target=MODEL, draft="d", rounds=9, verified=9)
        report = policy_pb2.FollowRequest(targets=[policy_pb2.TargetReport(model=MODEL, drafts=["d"])], evidence=[seen])
        follower = leader.follow()
        for passed_s in (1, -86_400, 1):
            now_s[0] += passed_s
            leader.received(follower, report)
            await leader.tick()
            assert leader.planner is not None and leader.planner.plan.now_s == now_s[0]


@pytest.mark.parametrize("router_reaches_store", [True, False])
async def test_a_leader_gives_way_when_only_it_is_cut_off_from_the_store(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, router_reaches_store: bool
) -> None:
    async def away(lease: LeaderLease) -> None:
        return None

    now_s = [100.0]
    async with plan_leader(fleet.store) as leader:
        monkeypatch.setattr(leader._lease, "_clock", lambda: now_s[0])
        await leader.tick()
        follower = leader.follow()
        leader.received(follower, policy_pb2.FollowRequest(reaches_store=router_reaches_store))
        monkeypatch.setattr(LeaderLease, "hold", away)
        now_s[0] += 5.0
        await leader.tick()
        assert leader.epoch == 1
        now_s[0] += 5.0
        await leader.tick()
        assert (leader.epoch, follower.over) == ((0, True) if router_reaches_store else (1, False))


async def test_an_answers_metrics_say_where_on_counted_as_auto(fleet: Any) -> None:
    policy = tenants_pb2.SpeculationPolicy(on_counts_as_auto=True)
    await fleet.store.tenants.put([tenants_pb2.Tenant(name="t", speculation=policy)], by="test")
    await fleet.target()
    await fleet.draft()
    async with control_plane(fleet):
        router = await fleet.start()
        await until(lambda: follows(router) and decision(router).policy.on_counts_as_auto)
        for mode, counted in ((router_pb2.SPECULATION_MODE_ON, 1), (router_pb2.SPECULATION_MODE_AUTO, 0)):
            answer = await fleet.ask(fleet.request(request_id=f"r{mode}", max_new_tokens=4, speculation=mode))
            assert answer.metrics.num_on_as_auto == counted
