"""What changes between two reads of the leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

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


def of_another_tokenizer(worker_id: str) -> LeaseRecord:
    """A draft for which no target fits."""
    draft = lease(worker_id)
    draft.info.role, draft.info.tokenizer_fingerprint = worker.WORKER_ROLE_DRAFT, "other"
    return draft


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


@asynccontextmanager
async def watching(leases: Leases, **options: Any) -> AsyncIterator[tuple[FleetWatch, list[Any]]]:
    """The watch of these leases, and the events that it has written when the block ends."""
    stream = Stream()
    stream.open.set()
    async with EventWriter(stream).running() as events:
        yield FleetWatch(leases, leases, events, **options), stream.taken


async def test_no_news_are_workers_told_before_those_missing_with_the_store_and_what_another_leader_tells() -> None:
    leases = Leases(lease("a"))
    leads = [True]
    async with watching(leases, leads=lambda: leads[0]) as (watch, told_of):
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
    assert told_of == [("worker_joined", joined)]


async def test_of_workers_that_were_there_first_those_are_told_that_nobody_has_told() -> None:
    leases = Leases(lease("a"), lease("b"), new=["b"])
    async with watching(leases) as (watch, told_of):
        await watch.look()
        await watch.look()
    assert [(kind, fields["worker_id"]) for kind, fields in told_of] == [("worker_joined", "b")]


async def test_a_drain_is_done_once_nothing_runs_for_a_while_and_that_is_said_once() -> None:
    at_s = [1000.0]
    cordon = control_pb2.Cordon(worker_id="a", reason="disk", since_unix_ms=1_000_000, hand_over_unix_ms=1_030_000)
    only_cordoned = control_pb2.Cordon(worker_id="b", since_unix_ms=1_000_000)
    busy = replace(lease("a"), cordon=cordon, load=worker.WorkerLoad(num_sequences=1))
    idle = replace(busy, load=worker.WorkerLoad())
    leases = Leases(busy, replace(lease("b"), cordon=only_cordoned))
    async with watching(leases, wall_clock=lambda: at_s[0]) as (watch, told_of):
        for at_s[0], leases.records[0] in ((1010.0, busy), (1002.0, idle), (1011.0, idle), (1012.0, idle)):
            await watch.look()
    drained = {"worker_id": "a", "role": "target", "address": "127.0.0.1:1", "model": "m", "reason": "disk"}
    assert told_of == [("worker_drained", drained)]
    assert cordon.drained_unix_ms == 1_011_000


async def test_a_draft_that_no_target_can_use_is_told_once_with_the_reason() -> None:
    draft = of_another_tokenizer("d")
    leases = Leases(lease("t"), draft)
    async with watching(leases) as (watch, told_of):
        await watch.look()
        await watch.look()
    [(kind, fields)] = told_of
    assert kind == "draft_unpaired" and fields["worker_id"] == "d"
    assert "tokenizer_fingerprint is '' on the target and 'other' on the draft" in fields["reason"]


def test_get_workers_says_which_draft_has_no_target_and_why() -> None:
    draft = of_another_tokenizer("d")
    listed = [control_pb2.WorkerStatus(info=one.info) for one in (draft, lease("t"))]
    rows = {row["id"]: row for row in worker_rows(listed)}
    assert (rows["d"]["status"], rows["t"]["status"]) == ("unpaired", "ready")
    assert "tokenizer_fingerprint" in rows["d"]["reason"]
