"""Who leads, and what it knows, when Redis has lost its memory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.metadata.leader import LeaderLease
from outrider.rpc.v1 import policy_pb2, tenants_pb2
from outrider.runtime.supervision import background

from tests.integration.gateway.scripted_router import until
from tests.integration.metadata.conftest import eventually
from tests.planning import plan_leader
from tests.redis_server import EmbeddedServer


async def test_after_a_lost_memory_who_led_leads_again_and_else_another_one_with_a_higher_epoch(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    leads, stands_by = store.plans.lease("a"), reader.plans.lease("b")
    assert (await leads.hold(), await stands_by.hold()) == (1, 0)
    raw.flushall()
    assert (await stands_by.hold(), await leads.hold(), await stands_by.hold()) == (0, 2, 0)
    raw.flushall()
    assert (await stands_by.hold(), await stands_by.hold(), await leads.hold()) == (0, 3, 0)


async def test_a_lease_that_older_data_bring_back_is_not_one_of_a_later_epoch(
    store: MetadataStore, reader: MetadataStore, raw: redis.Redis
) -> None:
    led, leads = store.plans.lease("a"), reader.plans.lease("b")
    assert await led.hold() == 1
    await led.resign()
    assert (await leads.hold(), await led.hold()) == (2, 0)
    # The replica that takes over has heard neither of the resignation nor of the other leader.
    raw.set("outrider:leader", "a", px=3000)
    raw.set("outrider:leaderepoch", 1)
    assert (await led.hold(), await led.hold()) == (0, 3)


async def test_who_leads_takes_a_higher_epoch_than_anybody_has_seen(store: MetadataStore, raw: redis.Redis) -> None:
    lease = store.plans.lease("a")
    assert await lease.hold() == 1
    lease.saw(7)
    lease.saw(2**60)
    assert (await lease.hold(), await lease.hold()) == (8, 8)


async def test_a_leader_tells_redis_again_what_operators_have_said(store: MetadataStore, raw: redis.Redis) -> None:
    async with plan_leader(store) as leader:
        off = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_OFF, by="operator")
        await store.plans.set_override("acme", off)
        await leader.tick()
        raw.flushall()
        await leader.tick()
    assert await store.plans.overrides() == {"acme": off}


async def test_what_operators_have_set_survives_a_memory_that_is_lost_while_it_is_read(
    store: MetadataStore, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plan_leader(store) as leader:
        off = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_OFF, by="operator")
        await store.plans.set_override("acme", off)
        await leader.tick()
        hold = LeaderLease.hold

        async def hold_and_flush(lease: LeaderLease) -> int | None:
            epoch = await hold(lease)
            raw.flushall()
            return epoch

        with monkeypatch.context() as patched:
            patched.setattr(LeaderLease, "hold", hold_and_flush)
            await leader.tick()
        await leader.tick()
    assert await store.plans.overrides() == {"acme": off}


async def test_who_leads_hears_at_once_of_what_is_set_at_another_control_plane(
    store: MetadataStore, reader: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_controller.control.plan.leading._TICK_S", 600.0)
    off = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_OFF)
    async with plan_leader(store) as leader:

        async def leads() -> bool:
            return leader.epoch > 0

        async def knows() -> bool:
            return "acme" in leader._policies.by_tenant()

        running = asyncio.create_task(leader.run())
        await eventually(leads)
        await reader.plans.set_override("acme", off)
        await eventually(knows)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_missed_that_is_set_between_two_looks(store: MetadataStore, reader: MetadataStore) -> None:
    assert await store.plans.changed(600.0)
    assert await store.plans.changed(0.01) is False
    await reader.tenants.put([tenants_pb2.Tenant(name="acme")], by="operator")
    assert await store.plans.changed(600.0)
    assert await store.plans.changed(0.01) is False


async def test_who_leads_plans_on_while_redis_is_away_and_logs_that_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_controller.control.plan.leading._TICK_S", 0.1)
    now_s = [1e9]
    with EmbeddedServer.start(tmp_path / "redis") as server:
        async with MetadataStore.connect(server.url) as store, plan_leader(store, clock=lambda: now_s[0]) as leader:
            await store.tenants.put([tenants_pb2.Tenant(name="gone")], by="test")
            await leader.tick()
            await store.tenants.delete("gone", by="test")
            report = policy_pb2.FollowRequest(targets=[policy_pb2.TargetReport(model="m", drafts=["d"])])
            leader.received(leader.follow(), report)
            async with background(leader.run(), "leader"):
                for away in (False, True):
                    if away:
                        server.stop()
                    now_s[0] += 60.0
                    await until(lambda: leader.planner is not None and leader.planner.plan.now_s == now_s[0])
                await asyncio.sleep(0.5)
                assert leader.epoch == 1
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and "metadata store is away" in said[0]
