"""Requests under way, and where each is open: on which target, with which draft, under which ids. Decides nothing.

The router talks to targets only: it names a draft, and the target opens the sequence there.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.limits import clamp_us
from outrider.protocol import logprobs
from outrider.protocol.rounds import Round
from outrider.protocol.sequences import opening_for_target, speculation_to_proto
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2
from outrider.sequence.speculation import Speculation

from outrider_controller.router.fleet.fleet import LeasedDraft, TargetLink
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import Recorder, now_us
from outrider_controller.router.observe.usage import Account, CallBill
from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.failover import FailoverState
from outrider_controller.router.request.state import BadReply, RequestState
from outrider_controller.router.speculation.controller import SpeculationController

# Closed target sequences whose account is remembered.
_MAX_CLOSED = 16_384
MAX_ATTACHED_BYTES = 2 << 30
"""Bound of the memory for the requests of attached servers, of all together: any of them may take several names."""
# As measured.
_REQUEST_BYTES, _TOKEN_BYTES, _KEPT_BYTES = 11_000, 42, 500

NewResponse = Callable[[], router.RouteResponse]
"""Returns the empty message that goes out next, to be filled in at once. Must neither raise nor block."""


@dataclass(slots=True)
class RoundTimer:
    """How long one request's rounds take, by the router's monotonic clock.

    Clocks of different machines are never compared: only durations are combined. A message's time on the network is
    the round trip that the router measured, less the time that the worker measured.
    """

    opened_us: int
    _committed_us: int = 0
    _fresh: bool = True
    """The target has committed nothing since the sequence was opened."""

    def __post_init__(self) -> None:
        self._committed_us = self.opened_us

    def opened(self, now_us: int) -> None:
        self.opened_us, self._fresh = now_us, True

    def commit(self, done: Round, now_us: int) -> None:
        """Adds the times of the round that has ended. Those of the draft were measured by the target."""
        done.round_us = clamp_us(now_us - self._committed_us)
        if self._fresh:
            wire_us = max(0, now_us - self.opened_us - done.queue_us - done.prefill_us - done.verify_us)
            done.wire_us = clamp_us(done.wire_us + wire_us)
        self._committed_us, self._fresh = now_us, False


class SequenceEvents:
    """Wakes the task of one request: something has changed, or an error ends the request."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self._error: OutriderError | None = None

    def wake(self) -> None:
        """A worker is missing, one may have come, or the request is finished. Several calls count as one."""
        self._happened.set()

    def fail(self, error: OutriderError) -> None:
        self._error = error
        self._happened.set()

    async def next(self) -> None:
        """Returns after a `wake`. Raises the error that ends the request, whatever woke it before."""
        await self._happened.wait()
        self._happened.clear()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class OpenTarget:
    sequence_id: int
    link: TargetLink
    account: Account


@dataclass(frozen=True, slots=True)
class OpenDraft:
    sequence_id: int
    """The id under which the target opens it at the draft."""
    worker: LeasedDraft


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request under way. Changed only in the event loop, by link callbacks and by the one task that drives it."""

    request: Request
    state: RequestState
    speculation: SpeculationController
    failover: FailoverState
    timer: RoundTimer
    recorder: Recorder
    new_response: NewResponse
    bill: CallBill = field(default_factory=CallBill)
    sent_revision: str = ""
    """Of the target's model, as last sent to the client."""
    sent_kinds: set[str] = field(default_factory=set)
    """Of drafts, as sent to the client."""
    room_until_s: float = math.inf
    """Until when it may look for a target with room, while it is `untouched`."""
    target: OpenTarget | None = None
    draft: OpenDraft | None = None
    events: SequenceEvents = field(default_factory=SequenceEvents)
    attached_bytes: int = 0
    """Its part of what is held of attached servers."""

    @property
    def num_bytes(self) -> int:
        """What is held of it, about."""
        return _REQUEST_BYTES + self.state.committed_len * _TOKEN_BYTES + self.recorder.num_kept * _KEPT_BYTES

    @property
    def going_on(self) -> Request:
        """As another worker would take it over now."""
        return replace(self.request, committed=tuple(self.state.committed))

    @property
    def lacks_draft(self) -> bool:
        """A draft is allowed, and none is open."""
        return self.draft is None and self.speculation.allowed.max_draft_tokens > 0 and not self.state.finished

    @property
    def untouched(self) -> bool:
        """Nothing was committed by any target: the request may still be turned away."""
        return self.state.stats.num_steps == 0

    def apply(self, commit: sequence.Commit, *, step_us: int, now_us: int) -> Round:
        """Appends what the target committed and returns the round, timed.

        Raises BadReply, changing nothing, when the commit does not continue this request.
        """
        done, options = Round.from_commit(commit, step_us), self.request.logprobs
        if options is not None:
            try:
                logprobs.check_commit(commit, options, self.state.prompt_len, self.state.vocab_size)
            except InvalidRequest as error:
                raise BadReply(f"commit.{error.field}: {error.message}") from None
        self.state.apply(done)
        self.timer.commit(done, now_us)
        self.state.stats.add(done)
        return done

    def respond(self, commit: sequence.Commit, done: Round) -> None:
        """Sends the last round applied to the client."""
        response, stats = self.new_response(), self.state.stats
        if self.failover.revision != self.sent_revision:
            response.model_revision = self.sent_revision = self.failover.revision
        done.fill(response)
        for one in done.sources:
            if one.source not in self.sent_kinds:
                self.sent_kinds.add(one.source)
                response.draft_kinds.append(one.source)
        if stats.num_steps == 1:
            response.num_cached_tokens = done.num_cached_tokens
        if done.finish_reason:
            response.metrics.CopyFrom(stats.to_proto())
        if self.request.logprobs is not None:
            logprobs.pass_on(commit, response)


class SequenceTable:
    def __init__(self, telemetry: RouterTelemetry, first_id: int | None = None) -> None:
        """`first_id`: of the sequences opened on workers; random if not given."""
        self._telemetry = telemetry
        # In order of arrival, which is the order in which they are served.
        self.requests: dict[ActiveRequest, None] = {}
        self.by_target: dict[int, ActiveRequest] = {}
        self.by_draft: dict[int, ActiveRequest] = {}
        self.attached_bytes = 0
        """Held of the requests of attached servers, about."""
        self._closed: OrderedDict[int, Account] = OrderedDict()
        """By id, of the target sequences closed last: their targets may still report usage for them."""
        # Random start: ids must not repeat after a restart, while workers still hold sequences of the process before.
        self._ids = itertools.count(secrets.randbits(62) + 1 if first_id is None else first_id)

    def at_target(self, link: TargetLink, sequence_id: int) -> ActiveRequest | None:
        """The request that is open on this target under this id. None for late replies, and for other targets' ids."""
        active = self.by_target.get(sequence_id)
        if active is None or active.target is None or active.target.link is not link:
            self._telemetry.late_reply("target")
            return None
        return active

    def account_of(self, link: TargetLink, sequence_id: int) -> Account | None:
        """Of the sequence that is open on this target under this id, or was until recently."""
        active = self.by_target.get(sequence_id)
        opened = None if active is None else active.target
        account = self._closed.get(sequence_id) if opened is None else opened.account
        return account if account is not None and account.worker_id == link.worker_id else None

    def at_draft_of(self, link: TargetLink, sequence_id: int) -> ActiveRequest | None:
        """The request that this target opened at a draft under this id."""
        active = self.by_draft.get(sequence_id)
        if active is None or active.target is None or active.target.link is not link:
            self._telemetry.late_reply("draft")
            return None
        return active

    def drafts_of(self, link: TargetLink) -> Counter[str]:
        """By draft worker, how many of this target's sequences it drafts for."""
        requests = [self.by_target[sequence_id] for sequence_id in link.open_sequences]
        return Counter(active.draft.worker.worker_id for active in requests if active.draft is not None)

    # -- opening

    def open(self, active: ActiveRequest, link: TargetLink, draft: LeasedDraft | None, setting: Speculation) -> None:
        """Opens the request on a target, which opens it at the draft."""
        if not link.up:
            active.events.wake()
            return
        # Attached servers choose the ids of theirs.
        sequence_id, at_us = next(each for each in self._ids if each not in self.by_target), now_us()
        self._opened(active, link, sequence_id, at_us)
        assignment = self._assign(active, draft, at_us) if draft is not None else None
        # Everything another target needs to continue from here.
        message = opening_for_target(active.request, sequence_id, active.state.committed, setting, assignment)
        link.outbox.last(message.ByteSize()).opens.append(message)
        active.timer.opened(at_us)

    def adopt(self, active: ActiveRequest, link: TargetLink, sequence_id: int) -> None:
        """The request runs on an attached target, which has announced it under this id. Raises InvalidRequest, or
        Overloaded while too much is held of such targets.
        """
        if sequence_id in self.by_target:
            raise InvalidRequest("sequence_id", "already open")
        if self.attached_bytes + active.num_bytes > MAX_ATTACHED_BYTES:
            raise Overloaded(f"attached servers have announced {self.attached_bytes} bytes", reason="ATTACHED_FULL")
        self._opened(active, link, sequence_id, now_us())
        self.has_room(active)

    def has_room(self, active: ActiveRequest) -> bool:
        """Counts what an attached target's request has become. Whether there is room for it."""
        grown = active.num_bytes - active.attached_bytes
        self.attached_bytes += grown
        active.attached_bytes += grown
        return self.attached_bytes <= MAX_ATTACHED_BYTES

    def _opened(self, active: ActiveRequest, link: TargetLink, sequence_id: int, at_us: int) -> None:
        account = Account(ledger_of(active.request, link), link.worker_id, at_us, call=active.bill)
        active.target = OpenTarget(sequence_id, link, account)
        active.failover.target_opened()
        self.by_target[sequence_id] = active
        link.open_sequences.add(sequence_id)
        active.recorder.opened(link.info, at_us)

    def set_draft(self, active: ActiveRequest, draft: LeasedDraft, setting: Speculation) -> None:
        """Names another draft, with its setting, to the target where the request is open."""
        if active.target is None:
            return
        self.set_speculation(active, setting)
        assignment = self._assign(active, draft, now_us())
        _set_draft(active.target, target_pb2.SetDraft(sequence_id=active.target.sequence_id, draft=assignment))

    def _assign(self, active: ActiveRequest, draft: LeasedDraft, at_us: int) -> sequence.DraftAssignment:
        opened = OpenDraft(next(self._ids), draft)
        active.draft = opened
        active.failover.draft_opened()
        self.by_draft[opened.sequence_id] = active
        draft.open_sequences.add(opened.sequence_id)
        active.recorder.opened(draft.info, at_us)
        return _assignment(draft, opened.sequence_id)

    def set_speculation(self, active: ActiveRequest, setting: Speculation) -> None:
        """Sends a setting to the target, which passes the draft's part on."""
        if active.target is None:
            return
        sequence_id = active.target.sequence_id
        message = sequence.SetSpeculation(sequence_id=sequence_id, speculation=speculation_to_proto(setting))
        active.target.link.outbox.last(message.ByteSize()).settings.append(message)

    # -- closing

    def drop_target(self, active: ActiveRequest, reason: sequence.CloseReason.ValueType | None) -> OpenTarget | None:
        """Forgets the target's sequence, and closes it there if a reason is given."""
        dropped, active.target = active.target, None
        if dropped is None:
            return None
        del self.by_target[dropped.sequence_id]
        self.attached_bytes -= active.attached_bytes
        active.attached_bytes = 0
        account = self._closed[dropped.sequence_id] = dropped.account
        account.closed_us, account.tokens_left = now_us(), active.state.remaining
        if reason == sequence.CLOSE_REASON_MOVED:
            # Another target commits the same tokens; the time of both is billed.
            account.call = CallBill(broken=True)
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        dropped.link.open_sequences.discard(dropped.sequence_id)
        if reason is not None and dropped.link.up:
            message = sequence.CloseSequence(sequence_id=dropped.sequence_id, reason=reason)
            dropped.link.outbox.last(message.ByteSize()).closes.append(message)
        return dropped

    def drop_draft(self, active: ActiveRequest) -> OpenDraft | None:
        """Forgets the draft's sequence: the target has closed it, or closes it with its own."""
        dropped, active.draft = active.draft, None
        if dropped is None:
            return None
        del self.by_draft[dropped.sequence_id]
        dropped.worker.open_sequences.discard(dropped.sequence_id)
        return dropped

    def release_draft(self, active: ActiveRequest, why: str) -> None:
        """The target closes the draft's sequence and decodes without a draft; the request looks for another."""
        self.set_speculation(active, active.speculation.lost())
        if (dropped := self.drop_draft(active)) is not None:
            active.recorder.lost(dropped.worker.info, why, now_us())
            if active.target is not None:
                _set_draft(active.target, target_pb2.SetDraft(sequence_id=active.target.sequence_id))
        active.events.wake()


def ledger_of(request: Request, link: TargetLink) -> str:
    """Under which name it is counted. No gateway has admitted what a server takes itself: it is no tenant's bill."""
    return f"{request.tenant} {link.worker_id}" if link.info.attached else request.tenant


def _set_draft(target: OpenTarget, change: target_pb2.SetDraft) -> None:
    target.link.outbox.last(change.ByteSize()).set_drafts.append(change)


def _assignment(draft: LeasedDraft, sequence_id: int) -> sequence.DraftAssignment:
    return sequence.DraftAssignment(worker_id=draft.worker_id, address=draft.address, sequence_id=sequence_id)
