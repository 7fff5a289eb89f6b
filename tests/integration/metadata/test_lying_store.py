"""A store that answers falsely: no call fails otherwise than where the store is away, and none takes memory for it."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from outrider.errors import OutriderError
from outrider.metadata import MetadataStore
from outrider.metadata.erasures import Order
from outrider.metadata.tenants.ledger import TenantUsage
from outrider.metadata.tenants.quota import QuotaRequest
from outrider.rpc.v1 import control_pb2, drafts_pb2, policy_pb2, tenants_pb2, worker_pb2

from tests.redis_server import EmbeddedServer
from tests.soak.lying_store import KINDS, LyingStore, lying_store

TARGET = worker_pb2.WORKER_ROLE_TARGET
KEY = tenants_pb2.ApiKey(id="k1", tenant="a", digest=b"d" * 32)
RATE = QuotaRequest(1.0, 10.0, 1.0)


@pytest.fixture
async def lying(tmp_path: Path) -> AsyncIterator[LyingStore]:
    with EmbeddedServer.start(tmp_path) as server:
        async with lying_store(str(server.socket_path), 1) as lying:
            yield lying


def calls(store: MetadataStore) -> list[Callable[[], Awaitable[Any]]]:
    """All that read or write there."""
    tenants, plans, drafts, erasures, lease = store.tenants, store.plans, store.drafts, store.erasures, None
    lease = plans.lease("me")
    cordon = control_pb2.Cordon(worker_id="t1", reason="r", by="x")
    rollout = drafts_pb2.Rollout(draft="d")
    decision = policy_pb2.TenantDecision(tenant="a", target="m")
    taken: dict[str, Any] = {"price": 1.0, "gateway": "g", "running": 1, "most_running": 5}
    return [
        lambda: store.problem(),
        lambda: store.workers(),
        lambda: store.lookup_prefix(TARGET, [b"h" * 16], ["t1"]),
        lambda: store.publish_prefix(TARGET, "t1", [b"h" * 16]),
        lambda: store.emit("fallback", {"reason": "test"}),
        lambda: store.events(),
        lambda: store.last_events(10),
        lambda: tenants.find(None),
        lambda: tenants.find(KEY.digest),
        lambda: tenants.keep_required(),
        lambda: tenants.put([tenants_pb2.Tenant(name="a")], by="x"),
        lambda: tenants.get("a"),
        lambda: tenants.page("", 10),
        lambda: tenants.add_key(KEY, by="x"),
        lambda: tenants.page_of_keys("", "", 1),
        lambda: tenants.revoke_key("k1", by="x"),
        lambda: tenants.note("action", "a", by="x"),
        lambda: tenants.audit(),
        lambda: tenants.delete("b", by="x"),
        lambda: tenants.deleted(),
        lambda: tenants.forgotten(["b"]),
        lambda: store.quotas.take("a", RATE, RATE, **taken),
        lambda: store.quotas.report_running("g", {"a": 1}),
        lambda: store.cordons.put(cordon, "cordon"),
        lambda: store.cordons.mark_drained(cordon, 1),
        lambda: store.cordons.remove("t1", "x"),
        lambda: store.ledger.write(1, "w", {"a": TenantUsage()}),
        lambda: store.ledger.read(0, 2),
        lambda: store.ledger.read(0, 2, "a"),
        lambda: plans.save(1, [decision]),
        lambda: plans.load(),
        lambda: plans.find("a", ["m"]),
        lambda: plans.set_override("default", tenants_pb2.SpeculationOverride()),
        lambda: plans.overrides(1),
        lambda: plans.changed(0.001),
        lambda: lease.hold(),
        lambda: lease.resign(),
        lambda: drafts.put_versions({"d": drafts_pb2.DraftVersion()}),
        lambda: drafts.put_evidence({"d": drafts_pb2.RolloutEvidence()}),
        lambda: drafts.put_rollout(rollout, "start", drafts_pb2.Rollout()),
        lambda: drafts.versions(1),
        lambda: drafts.rollouts(),
        lambda: drafts.evidence(),
        lambda: drafts.delete_version("d", by="x"),
        lambda: erasures.order("a", samples=True, by="x"),
        lambda: erasures.known([Order("a", True, 5)]),
        lambda: erasures.add_volume("v", "here"),
        lambda: erasures.obeyed("v", Order("a", True, 5)),
        lambda: erasures.orders(),
        lambda: erasures.volumes(),
        lambda: erasures.who_obeyed(),
        lambda: erasures.forget(["v"]),
    ]  # fmt: skip


async def _used(store: MetadataStore) -> None:
    """It is used again."""
    async with asyncio.timeout(60):
        while await store.plans.load() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


SLOW = {"late", "flood", "long", "many", "cut", "garbage"}
"""Each costs a timeout."""
NUM = 52


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_no_call_to_a_store_that_lies_fails_otherwise_than_to_one_that_is_away(
    lying: LyingStore, kind: str
) -> None:
    before, slow = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, kind in SLOW
    lying.kinds = (kind,)
    for turn in range(1 if slow else 10):
        # Each on a connection of its own: after some lies a store counts as away for a moment.
        for number in range(turn, NUM, 8 if slow else 1):
            async with MetadataStore.connect(lying.url) as store:
                lying.share = 0.5
                async with asyncio.timeout(60):
                    with suppress(OutriderError):
                        await calls(store)[number]()
                lying.share = 0.0
                await _used(store)
    assert lying.num_lies[kind]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 128 << 10
