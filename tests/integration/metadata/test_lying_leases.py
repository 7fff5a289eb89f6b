"""Leases that no worker of ours would write, beside sound ones: what the plan and a router make of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from outrider.metadata import MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.workers.lease_check import MOST
from outrider.protocol.identity import SPOKEN
from outrider.rpc.v1 import control_pb2, tenants_pb2, worker_pb2
from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import TargetState
from outrider_controller.control.api.rows import worker_rows
from outrider_controller.control.api.workers import Workers
from outrider_controller.control.fleet import FleetWatch
from outrider_controller.control.plan import kept_plan
from outrider_controller.control.plan.demand import Demand
from outrider_controller.control.plan.leading import PlanLeader
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.fleet.fleet import Fleet
from prometheus_client import CollectorRegistry

from tests.redis_server import EmbeddedServer

_ROLES = worker_pb2.WorkerRole
DRAFT, TARGET, ROUTER = _ROLES.WORKER_ROLE_DRAFT, _ROLES.WORKER_ROLE_TARGET, _ROLES.WORKER_ROLE_ROUTER
GATEWAY, CONTROL = _ROLES.WORKER_ROLE_GATEWAY, _ROLES.WORKER_ROLE_CONTROL
U32, U64 = 2**32 - 1, 2**64 - 1


def sound(worker_id: str, role: _ROLES.ValueType = DRAFT) -> control_pb2.WorkerStatus:
    info = worker_pb2.WorkerInfo(
        protocol_version=SPOKEN.newest, role=role, worker_id=worker_id, model="m", draft_kind="model", vocab_size=384
    )
    return control_pb2.WorkerStatus(info=info, address="127.0.0.1:1", pid=1)


def _said(role: _ROLES.ValueType = DRAFT, **fields: Any) -> Callable[[], tuple[_ROLES.ValueType, bytes]]:
    """A sound lease with these fields, each of the message that has it."""

    def make() -> tuple[_ROLES.ValueType, bytes]:
        status = sound("liar", role)
        for name, value in fields.items():
            for message in (status.load.gpu, status.load, status.info, status):
                if name in message.DESCRIPTOR.fields_by_name:
                    setattr(message, name, value)
                    break
        return role, status.SerializeToString()

    return make


def _raw(value: bytes) -> Callable[[], tuple[_ROLES.ValueType, bytes]]:
    return lambda: (DRAFT, value)


def _many_caps() -> tuple[_ROLES.ValueType, bytes]:
    status = sound("liar", TARGET)
    status.info.attached = True
    status.info.tenant_draft_tokens.update({f"t{n}": U32 for n in range(2000)})
    return TARGET, status.SerializeToString()


def _wrong_types() -> bytes:
    """The id as a number, the load as a number, the address as a message."""
    return bytes([0x0A, 4, 0x10, DRAFT, 0x18, 7, 0x10, 5, 0x1A, 2, 0x08, 1])


LIES: dict[str, Callable[[], tuple[_ROLES.ValueType, bytes]]] = {
    "nan": _said(utilization=math.nan),
    "infinite": _said(power_watts=math.inf),
    "negative": _said(utilization=-1.0),
    "negatively infinite": _said(power_watts=-math.inf),
    "share above one": _said(utilization=3.4e38),
    "sequences at the end of the type": _said(num_running=U32),
    "sums that do not fit": _said(num_running=U32, num_waiting=U32, num_sequences=U32),
    "time at the end of the type": _said(row_ns=U64),
    "time of 584 years a token": _said(prefill_token_ns=2**63),
    "memory at the end of the type": _said(device_memory_bytes=U64),
    "used memory at the end of the type": _said(memory_used_bytes=2**63),
    "more free blocks than blocks": _said(num_blocks=10, num_free_blocks=11),
    "context at the end of the type": _said(TARGET, max_context_len=U32),
    "vocabulary at the end of the type": _said(TARGET, vocab_size=U32),
    "blocks of the whole type": _said(TARGET, block_size=U32, num_blocks=U32),
    "drafts at the end of the type": _said(max_draft_tokens=U32),
    "version of the far future": _said(protocol_version=U32),
    "oldest version above the newest": _said(protocol_version=1, min_protocol_version=2),
    "huge name": _said(model="m" * 1_000_000),
    "long name": _said(model="m" * 257),
    "name with lines of a log": _said(model="m\n2026 everything is fine"),
    "revision of control characters": _said(model_revision="\x1b[2J"),
    "huge recipe": _said(recipe=json.dumps("x" * 5000)),
    "attached draft": _said(attached=True),
    "tenants without end": _many_caps,
    "no role": _said(role=0),
    "unknown role": _said(role=-1),
    "another's record": _raw(sound("somebody").SerializeToString()),
    "no address": _said(address=""),
    "address of words": _said(address="the next room"),
    "wrong types": _raw(_wrong_types()),
    "no message": _raw(b"\xff" * 40),
    "a message cut off": _raw(sound("liar").SerializeToString()[:-7]),
    "no text": _raw(sound("liar").SerializeToString().replace(b"model", b"\xff\xfe\xfd\xfc\xfb")),
    "without end": _said(),
    "cordoned in the future": _said(),
    "of a router, in its place": _said(ROUTER, num_running=U32),
    "of a gateway": _said(GATEWAY, num_sequences=U32),
    "of a control plane": _said(CONTROL, address="127.0.0.1:99999999"),
}
_HARMLESS: dict[str, str] = {
    "half a character": '{"parent_revision": "\\ud800"}',
    "depth": "[" * 4000,
    "a number too long to read": "1" * 4000,
}
"""Recipes that are none: the worker has its place, and they are shown to nobody as a parent."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(tmp_path_factory.mktemp("leases") / "r") as server:
        yield server


@pytest.fixture
def server(shared: EmbeddedServer) -> EmbeddedServer:
    """Empty: no lie harms a server, so that one is enough for all of them."""
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


async def looked_at(store: MetadataStore) -> tuple[PlanLeader, Fleet, list[dict[str, Any]]]:
    """A tick of the plan, a router's look, and one of the fleet's watch; the workers as an operator is shown them."""
    async with EventWriter(store).running() as events:
        leader = PlanLeader("a", store, events, Demand(CollectorRegistry()))
        await leader.tick()
        assert leader.epoch
        follower = leader.follow()
        follower.states = {"m": TargetState(frozenset(["m@/model"]))}
        leader._planned_s = -math.inf
        await leader.tick()
        await leader._kept.save(leader._planner, leader.epoch)
        await leader._versions.save(leader.epoch)
        fleet = Fleet(store, RouterConfig(), Mock(), lambda: None)
        await fleet.refresh()
        await FleetWatch(store, store.cordons, events).look()
        answer = await Workers(store, events).ListWorkers(control_pb2.ListWorkersRequest(), None)
    return leader, fleet, worker_rows(answer.workers)


def write(raw: redis.Redis, role: str, worker_id: str, value: bytes, *, ends: bool = True) -> None:
    raw.set(f"outrider:lease:{role}:{worker_id}", value, px=5000 if ends else None)
    raw.sadd(f"outrider:workers:{role}", worker_id)


@pytest.mark.parametrize("kind", LIES)
async def test_a_lease_that_lies_is_left_out_by_name_and_all_others_are_planned_and_used(
    store: MetadataStore, raw: redis.Redis, kind: str
) -> None:
    role, value = LIES[kind]()
    name = _ROLES.Name(role).removeprefix("WORKER_ROLE_").lower() if role in (2, 3, 4, 5) else "draft"
    write(raw, name, "liar", value, ends=kind != "without end")
    if kind == "cordoned in the future":
        raw.set("outrider:cordon:liar", control_pb2.Cordon(worker_id="liar", since_unix_ms=U64).SerializeToString())
    write(raw, "draft", "sound", sound("sound").SerializeToString())
    leader, fleet, rows = await looked_at(store)
    assert Cell("", "m") in leader._planner.plan.index
    assert [one.version for one in await store.drafts.versions()] == ["m@/model"]
    assert list(fleet.drafts) == ["sound"] and not fleet.targets and fleet.loads.num_routers == 1
    by_id = {row["id"]: row for row in rows}
    assert by_id["sound"]["status"] == "ready"
    assert (by_id["liar"]["status"], by_id["liar"]["role"]) == ("refused", name)
    [told] = [one.fields for one in await store.last_events(100) if one.kind == "lease_refused"]
    assert (told["worker_id"], told["role"]) == ("liar", name)
    assert told["reason"] and by_id["liar"]["reason"].startswith(told["reason"])


@pytest.mark.parametrize("kind", _HARMLESS)
async def test_a_recipe_that_is_none_costs_its_worker_nothing_and_the_plan_neither(
    store: MetadataStore, raw: redis.Redis, kind: str
) -> None:
    status = sound("liar")
    status.info.recipe = _HARMLESS[kind]
    write(raw, "draft", "liar", status.SerializeToString())
    leader, fleet, _ = await looked_at(store)
    assert Cell("", "m") in leader._planner.plan.index and list(fleet.drafts) == ["liar"]
    assert [one.parent_revision for one in await store.drafts.versions()] == [""]


async def test_an_id_of_another_role_moves_no_work_from_whose_it_is(store: MetadataStore, raw: redis.Redis) -> None:
    write(raw, "draft", "draft-1", sound("draft-1").SerializeToString())
    thief = sound("draft-1", GATEWAY)
    thief.load.draining = True
    write(raw, "gateway", "draft-1", thief.SerializeToString())
    _, fleet, _ = await looked_at(store)
    assert fleet.loads.takes_work(fleet.drafts["draft-1"])
    assert store.refused.keys() == {(GATEWAY, "draft-1")}


async def test_a_lease_that_begins_to_lie_is_lost_at_once(store: MetadataStore, raw: redis.Redis) -> None:
    write(raw, "draft", "liar", sound("liar").SerializeToString())
    assert len(await store.workers()) == 1
    write(raw, "draft", "liar", LIES["nan"]()[1])
    assert await store.workers() == [] and store.given_back == frozenset()


async def test_what_cannot_be_planned_of_one_tenant_is_left_out_alone(
    store: MetadataStore, raw: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = kept_plan.decision_to_proto

    def fails_for_one(cell: Cell, *more: Any) -> Any:
        if cell.tenant == "odd":
            raise OverflowError("cannot convert float infinity to integer")
        return make(cell, *more)

    monkeypatch.setattr(kept_plan, "decision_to_proto", fails_for_one)
    for name in ("odd", "even"):
        override = tenants_pb2.SpeculationOverride(setting=tenants_pb2.SPECULATION_SETTING_ON, until_unix_ms=U64)
        await store.plans.set_override(name, override)
    write(raw, "draft", "sound", sound("sound").SerializeToString())
    await looked_at(store)
    kept = await store.plans.load()
    assert kept is not None and {one.tenant for one in kept} == {"", "even"}
    assert "the plan leaves out tenant odd at m" in caplog.text


def test_every_number_of_a_lease_has_a_bound() -> None:
    messages = worker_pb2.WorkerInfo, worker_pb2.WorkerLoad, worker_pb2.GpuLoad
    numbers = {
        field.name
        for message in messages
        for field in message.DESCRIPTOR.fields
        if field.message_type is None and field.type not in (field.TYPE_STRING, field.TYPE_BOOL, field.TYPE_ENUM)
    }
    assert numbers <= MOST.keys()
