"""What changes between two reads of the leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.metadata import LeaseRecord
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import Event
from outrider.metadata.workers.directory import Key
from outrider.rpc.v1 import control_pb2
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.control.api.rows import worker_rows
from outrider_controller.control.fleet import FleetWatch, by_key, changes

from tests.unit.metadata.test_event_writer import Stream


def lease(worker_id: str, *, draining: bool = False) -> LeaseRecord:
    info = worker.WorkerInfo(worker_id=worker_id, role=worker.WORKER_ROLE_TARGET, model="m")
    return LeaseRecord(info, worker.WorkerLoad(draining=draining), "127.0.0.1:1", 1)


def told(before: list[LeaseRecord], now: list[LeaseRecord], given_back: frozenset[Key] = frozenset()) -> list[str]:
    found = changes(by_key(before), by_key(now), given_back)
    return [f"{change.kind} {change.worker.info.worker_id}" for change in found]


def test_a_worker_that_was_stopped_has_left_and_one_whose_lease_ran_out_is_lost() -> None:
    stays, stopped, drained, killed, new = (lease(name) for name in ("stays", "stopped", "drained", "killed", "new"))
    drained = lease("drained", draining=True)
    said = told([stays, stopped, drained, killed], [stays, new], frozenset({stopped.key}))
    assert said == ["worker_joined new", "worker_left stopped", "worker_left drained", "worker_lost killed"]


class Leases:
    """What the store would answer."""

    def __init__(self, *records: LeaseRecord, new: Sequence[str] = ()) -> None:
        """`new`: those whose joining nobody has told."""
        self.records = list(records)
        self.told = {record.info.worker_id for record in records} - set(new)
        self.available = True
        self.given_back: frozenset[Key] = frozenset()
        self.refused: dict[Key, str] = {}

    async def workers(self) -> list[LeaseRecord]:
        return self.records

    async def last_events(self, limit: int) -> list[Event]:
        return [Event("1-0", "worker_joined", {"worker_id": name}) for name in self.told]

    async def mark_drained(self, cordon: control_pb2.Cordon, drained_unix_ms: int) -> None:
        cordon.drained_unix_ms = drained_unix_ms


async def test_no_news_are_workers_told_before_those_missing_with_the_store_and_what_another_leader_tells() -> None:
    stream = Stream()
    stream.open.set()
    leases = Leases(lease("a"))
    leads = [True]
    async with EventWriter(stream).running() as events:
        watch = FleetWatch(leases, leases, events, leads=lambda: leads[0])
        await watch.look()
        leases.records, leases.available = [], False
        await watch.look()
        leases.records, leases.available = [lease("a"), lease("b")], True
        await watch.look()
        leads[0] = False
        leases.records = [lease("b"), lease("c")]
        await watch.look()
        leads[0] = True
        await watch.look()
    joined = {"worker_id": "b", "role": "target", "address": "127.0.0.1:1", "model": "m"}
    assert stream.taken == [("worker_joined", joined)]


async def test_of_workers_that_were_there_first_those_are_told_that_nobody_has_told() -> None:
    stream = Stream()
    stream.open.set()
    leases = Leases(lease("a"), lease("b"), new=["b"])
    async with EventWriter(stream).running() as events:
        watch = FleetWatch(leases, leases, events)
        await watch.look()
        await watch.look()
    assert [(kind, fields["worker_id"]) for kind, fields in stream.taken] == [("worker_joined", "b")]


async def test_a_drain_is_done_once_nothing_runs_for_a_while_and_that_is_said_once() -> None:
    stream = Stream()
    stream.open.set()
    at_s = [1000.0]
    cordon = control_pb2.Cordon(worker_id="a", reason="disk", since_unix_ms=1_000_000, hand_over_unix_ms=1_030_000)
    only_cordoned = control_pb2.Cordon(worker_id="b", since_unix_ms=1_000_000)
    busy = replace(lease("a"), cordon=cordon, load=worker.WorkerLoad(num_sequences=1))
    idle = replace(busy, load=worker.WorkerLoad())
    leases = Leases(busy, replace(lease("b"), cordon=only_cordoned))
    async with EventWriter(stream).running() as events:
        watch = FleetWatch(leases, leases, events, wall_clock=lambda: at_s[0])
        for at_s[0], leases.records[0] in ((1010.0, busy), (1002.0, idle), (1011.0, idle), (1012.0, idle)):
            await watch.look()
    drained = {"worker_id": "a", "role": "target", "address": "127.0.0.1:1", "model": "m", "reason": "disk"}
    assert stream.taken == [("worker_drained", drained)]
    assert cordon.drained_unix_ms == 1_011_000


async def test_a_draft_that_no_target_can_use_is_told_once_with_the_reason() -> None:
    stream = Stream()
    stream.open.set()
    draft = lease("d")
    draft.info.role, draft.info.tokenizer_fingerprint = worker.WORKER_ROLE_DRAFT, "other"
    leases = Leases(lease("t"), draft)
    async with EventWriter(stream).running() as events:
        watch = FleetWatch(leases, leases, events)
        await watch.look()
        await watch.look()
    [(kind, fields)] = stream.taken
    assert kind == "draft_unpaired" and fields["worker_id"] == "d"
    assert "tokenizer_fingerprint is '' on the target and 'other' on the draft" in fields["reason"]


def test_get_workers_says_which_draft_has_no_target_and_why() -> None:
    draft = lease("d")
    draft.info.role, draft.info.tokenizer_fingerprint = worker.WORKER_ROLE_DRAFT, "other"
    listed = [control_pb2.WorkerStatus(info=one.info) for one in (draft, lease("t"))]
    rows = {row["id"]: row for row in worker_rows(listed)}
    assert (rows["d"]["status"], rows["t"]["status"]) == ("unpaired", "ready")
    assert "tokenizer_fingerprint" in rows["d"]["reason"]
