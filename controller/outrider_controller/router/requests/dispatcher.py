"""Carries requests to their finish: passes commits from targets to clients, and reopens lost sequences elsewhere.

Replies are handled in the callback that receives them, which neither waits nor wakes a task: the results of one engine
step go out in one message to each gateway. Only the search for another worker waits, in the task of its request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from outrider.errors import Cancelled, DeadlineExceeded, OutriderError
from outrider.protocol.errors import from_sequence_error
from outrider.protocol.rounds import Round
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import router_pb2, target_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.runtime.supervision import background

from outrider_controller.router.admission.queue import AdmissionQueue
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.fleet.fleet import Fleet, TargetLink, TargetListener
from outrider_controller.router.fleet.placement import same_weights
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import TraceBatch, Traces, now_us
from outrider_controller.router.observe.usage import UsageSums
from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.failover import Fault, Loss, fault_of, loss_of
from outrider_controller.router.request.state import BadReply
from outrider_controller.router.requests.assignment import Assigner, Directory, WorkerPicker
from outrider_controller.router.requests.sequences import ActiveRequest, NewResponse, SequenceTable
from outrider_controller.router.requests.settings import SettingsSender
from outrider_controller.router.speculation.policy import Policy


class Dispatcher:
    """All requests of one router. Links and their tasks live while it is `running`."""

    def __init__(
        self,
        directory: Directory,
        config: RouterConfig,
        telemetry: RouterTelemetry,
        traces: Traces,
        connect: Connect = create_channel,
        first_id: int | None = None,
    ) -> None:
        """`first_id`: of the sequences opened on workers; random if not given."""
        listener = TargetListener(lambda link: self.fleet.notify(), self._target_down, self._target_replied)
        self.fleet = Fleet(directory, config, listener, self._fleet_changed, connect)
        self.picker = WorkerPicker(self.fleet, directory, config.failover.draft_backoff_s)
        self.table = SequenceTable(telemetry, first_id)
        self.traces = traces
        self.admission = AdmissionQueue(config.admission, self.fleet, telemetry)
        self.policy = Policy(config.policy)
        self.settings_sender = SettingsSender(self.policy, self.fleet, self.table, telemetry)
        self.usage = UsageSums()
        self.attached_usage = UsageSums()
        """What servers that take their requests themselves say that they served, by tenant and server."""
        self.assigner = Assigner(self.fleet, self.picker, self.table, self.policy, self.admission, config, telemetry)
        self._telemetry = telemetry
        self._num_runs = 0
        """Requests that run, wait for a place, or look for a target."""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Dispatcher]:
        async with self.fleet.running(), background(self.settings_sender.keep_planning(), "plan"):
            yield self

    async def idle(self) -> None:
        """Returns once no request is left."""
        while self._num_runs:
            self._ended.clear()
            await self._ended.wait()

    async def run(
        self, request: Request, new_response: NewResponse, deadline_s: float | None = None, call_id: int = 0
    ) -> None:
        """Carries one request to its finish, with a message from `new_response` for each round.

        `deadline_s`: seconds from now; `call_id`: its gateway's. Raises OutriderError. In every case its workers are
        informed of the end at once.
        """
        active: ActiveRequest | None = None
        reason, fault = sequence.CLOSE_REASON_CANCELLED, Cancelled.default_reason
        recorder, bill = self.traces.start(request, now_us()), self.usage.began(call_id, request.tenant)
        self._num_runs += 1
        try:
            on_accepted = partial(_send_phase, new_response, router_pb2.ROUTE_PHASE_ACCEPTED)
            async with _within(deadline_s), self.admission.place(request, deadline_s, on_accepted) as until_s:
                active = await self.assigner.begin(request, new_response, recorder, bill, until_s)
                _send_phase(new_response, router_pb2.ROUTE_PHASE_OPENED)
                while not active.state.finished:
                    await active.events.next()
                    await self.assigner.reopen(active)
        except OutriderError as error:
            fault = error.reason or error.default_reason
            if isinstance(error, DeadlineExceeded):
                reason = sequence.CLOSE_REASON_DEADLINE
            if active is None or active.untouched:
                self._telemetry.rejected(request.tenant, error)
            raise
        finally:
            if active is not None:
                self.end(active, reason)
            self._num_runs -= 1
            self._ended.set()
            self.traces.end(recorder, fault, now_us())

    def end(self, active: ActiveRequest, reason: sequence.CloseReason.ValueType) -> None:
        active.speculation.ended()
        self.table.requests.pop(active, None)
        self.table.drop_target(active, reason)
        self.table.drop_draft(active)

    # -- replies of targets

    def _target_replied(self, link: TargetLink, reply: target_pb2.VerifyResponse) -> None:
        at_us, step_us = now_us(), reply.step_us
        batch = TraceBatch(reply.batch_sequences, reply.batch_tokens)
        link.price.update(reply, at_us / 1e6)
        counted = []
        usage = self.attached_usage if link.info.attached else self.usage
        for commit in reply.commits:
            if active := self.table.at_target(link, commit.sequence_id):
                try:
                    done = active.apply(commit, step_us=step_us, now_us=at_us)
                except BadReply as bad:
                    self._lose_target(active, f"malformed reply: {bad}", Fault.WORKER)
                    continue
                counted.append((active, active.draft, done))
                active.respond(commit, done)
                assert active.target is not None
                usage.round(active.target.account, commit, done, at_us, active.request)
                if link.info.attached:
                    self._telemetry.attached_tokens(done.num_tokens)
                setting = active.speculation.sent
                active.recorder.round(done, setting=setting, batch=batch, now_us=at_us)
                active.failover.round_committed()
                if done.finish_reason:
                    active.events.wake()
                    self.table.drop_target(active, None)
                    self.table.drop_draft(active)
                elif link.info.attached and not self.table.has_room(active):
                    self._lose_target(active, "attached servers have too much open", Fault.FULL)
            elif account := self.table.account_of(link, commit.sequence_id):
                late = Round.from_commit(commit, step_us)
                if account.late(late.num_tokens):
                    usage.round(account, commit, late, at_us)
        for used in reply.usage:
            if account := self.table.account_of(link, used.sequence_id):
                usage.ended(account, used, at_us)
        if counted:
            # After the clients' messages of this step were sent.
            asyncio.get_running_loop().call_soon(self.settings_sender.after_step, counted, link.price.row, at_us)
        for error in reply.errors:
            if active := self.table.at_target(link, error.sequence_id):
                self._target_refused(active, error)
        for error in reply.draft_errors:
            if active := self.table.at_draft_of(link, error.sequence_id):
                self._draft_failed(active, error)

    def _target_refused(self, active: ActiveRequest, message: sequence.SequenceError) -> None:
        error = from_sequence_error(message)
        fault = fault_of(error.code)
        if fault is Fault.REQUEST:
            self.table.drop_target(active, None)
            active.events.fail(error)
            return
        self._lose_target(active, str(error), fault)

    def _target_down(self, link: TargetLink, why: str) -> None:
        for sequence_id in tuple(link.open_sequences):
            self._lose_target(self.table.by_target[sequence_id], why, Fault.CONNECTION)
        self.fleet.went_down(link)

    def _lose_target(self, active: ActiveRequest, why: str, fault: Fault) -> None:
        lost = self.table.drop_target(active, sequence.CLOSE_REASON_MOVED)
        if lost is None:
            return
        active.failover.target_lost(lost.link.key, fault)
        active.recorder.lost(lost.link.info, fault.value, now_us())
        self._telemetry.lost_target(lost.link.worker_id, active.request, fault, why)
        active.events.wake()

    def _draft_failed(self, active: ActiveRequest, message: sequence.SequenceError) -> None:
        """The target decodes without a draft. The request's task looks for another one, or later for the same."""
        loss = loss_of(message.reason, names_field=bool(message.field))
        target, lost = active.target, self.table.drop_draft(active)
        assert target is not None and lost is not None
        draft_id = lost.worker.worker_id
        if loss in (Loss.UNREACHABLE, Loss.WORKER):
            self.picker.unreachable.failed(target.link.worker_id, draft_id, asyncio.get_running_loop().time())
        active.failover.draft_lost(draft_id, loss)
        self.table.set_speculation(active, active.speculation.lost())
        active.recorder.lost(lost.worker.info, loss.value, now_us())
        self._telemetry.lost_draft(draft_id, active.request, loss, str(from_sequence_error(message)))
        active.events.wake()

    def _fleet_changed(self) -> None:
        if self.fleet.loads.cordons:
            self._hand_over(time.time())
        self.admission.fleet_changed()
        if not self.picker.draft_has_room():
            return
        for active in self.table.requests:
            if active.lacks_draft:
                active.events.wake()

    def _hand_over(self, now_unix_s: float) -> None:
        """Moves requests off workers that operators drain: off drafts at once, off targets when their time has come.

        Each then looks for another worker itself. One that no other target could continue stays until it has finished.
        """
        for worker_id, cordon in self.fleet.loads.cordons.items():
            if not cordon.hand_over_unix_ms:
                continue
            if (draft := self.fleet.drafts.get(worker_id)) is not None:
                for sequence_id in tuple(draft.open_sequences):
                    self.table.release_draft(self.table.by_draft[sequence_id], "draining")
            if (
                link := self.fleet.targets.get(worker_id)
            ) is not None and now_unix_s * 1000 >= cordon.hand_over_unix_ms:
                for sequence_id in tuple(link.open_sequences):
                    if self._can_move(active := self.table.by_target[sequence_id]):
                        self._lose_target(active, "an operator drains it", Fault.LEAVING)
                        # The fleet leaves it out while it is cordoned; afterwards it may be the only one.
                        active.failover.leaving_targets.discard(link.key)

    def _can_move(self, active: ActiveRequest) -> bool:
        others = self.fleet.live_targets(active.request.model)
        return any(same_weights(other.info.model_revision, active.failover.revision) for other in others)


def _send_phase(new_response: NewResponse, phase: router_pb2.RoutePhase.ValueType) -> None:
    new_response().phase = phase


@asynccontextmanager
async def _within(deadline_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the block takes longer; None means that it may."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the request was finished") from None
