"""The drafts of one server that takes its requests itself: of the workers that a router names, or at fixed addresses.

A router that is attached decides. When it is lost, everything goes on as it last said. Lives in an event loop; knows
neither vLLM nor the thread that schedules, which is sent events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafting.pool import DraftLeases
from outrider.drafting.source import CloseReason, DraftAssignment
from outrider.metadata import LeaseRecord
from outrider.protocol.errors import from_sequence_error
from outrider.rpc.v1 import sequence_pb2, target_pb2, worker_pb2
from outrider.runtime.supervision import until_first_ends
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.requests.events import Adjusted, Event
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.wire import events_of, response_of
from outrider.vllm.drafts import beyond_a_step
from outrider.vllm.server.fixed_drafts import FixedDrafts, Reach
from outrider.vllm.server.router_link import RouterLink, RouterReach
from outrider.worker.events import Opened

_STREAM = 0
"""All sequences have keys of one stream."""
_MAX_TENANTS, _MAX_NAMED = 10_000, 1000


@dataclass(frozen=True, slots=True)
class Followed:
    """A draft worker follows the sequence from now on, and is to be told of what it commits."""

    key: SequenceKey


class ServerDrafts:
    def __init__(
        self,
        limits: Limits,
        reach: Reach,
        post: Callable[[list[Any]], None],
        router: RouterReach | None = None,
        erase: Callable[[str], int] = lambda tenant: 0,
    ) -> None:
        """`post` takes what the thread that schedules has to know: drafts, and settings of routers. `erase`: as a
        LearningSource does; called here, because that thread sleeps while there are no requests."""
        leases = DraftLeases(self._leases, time.monotonic)
        reached = leases, reach.connect, reach.credential
        self.pooled = PoolDrafts(limits, time.monotonic, post, self._answer, *reached, deepen=beyond_a_step)
        self.fixed = FixedDrafts(reach, self._assign)
        self.router = None if router is None else RouterLink(router, self._router_message, self._router_changed)
        self._limits = limits
        self._post = post
        self._erase = erase
        self._named: dict[str, LeaseRecord] = {}
        """Draft workers that routers have named, by id."""
        self._unsettled: dict[SequenceKey, SequenceSpec] = {}
        """Openings to which no router has said anything yet."""
        self._tenants: dict[int, str] = {}
        """Of the open sequences."""
        self._last: dict[str, Speculation] = {}
        """The last setting of a router, by tenant."""

    async def run(self) -> None:
        router = [] if self.router is None else [self.router.run()]
        try:
            await until_first_ends(self.fixed.run(), *router)
        finally:
            await self.pooled.stop()

    def open(self, opened: Opened, announced: sequence_pb2.OpenSequence | None = None) -> None:
        """`announced`: what a router is sent, if one shall follow it."""
        key, spec = opened.key, opened.spec
        if self.router is None or announced is None:
            self._apply(opened)
            self.fixed.open(key)
            return
        self._tenants[key.sequence_id] = spec.tenant
        self._unsettled[key] = spec
        self._apply(replace(opened, spec=replace(spec, speculation=Speculation())))
        self.router.open(announced)
        if not self.router.attached:
            self._settle(key)

    def step(self, report: TargetReport) -> None:
        """Sends what a step has committed to drafts, and to the router."""
        self.pooled.take_report(report)
        for committed in report.commits:
            if committed.finish is not Finish.NONE:
                self._forget(committed.key)
        if self.router is not None:
            for response in response_of(report).values():
                self.router.step(response)

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        """The sequence has ended without a finish in a commit."""
        value = sequence_pb2.CloseReason.ValueType(reason.value)
        closed = sequence_pb2.CloseSequence(sequence_id=key.sequence_id, reason=value)
        self.pooled.apply(_STREAM, target_pb2.VerifyRequest(closes=[closed]), [])
        self._forget(key)
        if self.router is not None:
            self.router.close(closed)

    def _forget(self, key: SequenceKey) -> None:
        self.fixed.close(key)
        self._unsettled.pop(key, None)
        self._tenants.pop(key.sequence_id, None)

    def _apply(self, event: Event) -> None:
        self.pooled.apply(_STREAM, target_pb2.VerifyRequest(), [event])

    def _assign(self, key: SequenceKey, assignment: DraftAssignment) -> None:
        self._post([Followed(key)])
        self.pooled.assign(key, assignment)

    # -- the router

    def _router_changed(self) -> None:
        assert self.router is not None
        if self.router.attached:
            # It names a draft where it wants one.
            self.fixed.clear()
        else:
            for key in list(self._unsettled):
                self._settle(key)

    def _settle(self, key: SequenceKey) -> None:
        """Without a router: by its last setting for the tenant, or else by the server's own, whose cap holds."""
        spec = self._unsettled.pop(key)
        own = spec.speculation
        event = Adjusted(key, self._last.get(spec.tenant, own).within(own))
        self._apply(event)
        self._post([event])
        self.fixed.open(key)

    def _router_message(self, message: target_pb2.VerifyRequest) -> None:
        for change in message.set_drafts:
            draft = change.draft
            if len(self._named) >= _MAX_NAMED:
                self._named.clear()
            self._named[draft.worker_id] = _record(draft.worker_id, draft.address)
        events = [event for event in events_of(message, _STREAM, self._limits, 0.0) if isinstance(event, Adjusted)]
        for event in events:
            self._unsettled.pop(event.key, None)
            tenant = self._tenants.get(event.key.sequence_id)
            if tenant is not None and (tenant in self._last or len(self._last) < _MAX_TENANTS):
                self._last[tenant] = event.speculation
        changes = target_pb2.VerifyRequest(set_drafts=message.set_drafts)
        self.pooled.apply(_STREAM, changes, events)
        self._post(list(events))
        for close in message.closes:
            key = SequenceKey(_STREAM, close.sequence_id)
            self._apply(plain := Adjusted(key, Speculation()))
            self._post([plain])
            self.pooled.assign(key, None)
        for erasure in message.erasures:
            assert self.router is not None
            # No samples are recorded here.
            self.router.erased(0 if erasure.samples else self._erase(erasure.tenant))

    def _answer(self, stream: int, response: target_pb2.VerifyResponse) -> None:
        """What PoolDrafts has to say beside commits."""
        if self.router is not None and self.router.attached:
            self.router.step(response)
            return
        for error in response.draft_errors:
            self.fixed.lost(error.sequence_id, from_sequence_error(error))

    async def _leases(self) -> Iterable[LeaseRecord]:
        return [*self.fixed.workers.values(), *self._named.values()]


def _record(worker_id: str, address: str) -> LeaseRecord:
    return LeaseRecord(worker_pb2.WorkerInfo(worker_id=worker_id), worker_pb2.WorkerLoad(), address, 0)
