"""Carries requests to their finish: commits from targets go to clients, and what breaks is opened elsewhere.

Replies are handled where they arrive, without waiting and without waking a task: all that one engine step says goes out
in one message to each gateway. Only the search for another worker waits, in the task of the request concerned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from outrider.errors import Cancelled, DeadlineExceeded, OutriderError
from outrider.protocol.errors import from_sequence_error
from outrider.protocol.rounds import Round
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2
from outrider.supervision import Backoff, beside, keep_running

from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import TargetState
from outrider_controller.router.admission import Request
from outrider_controller.router.admission_queue import AdmissionQueue
from outrider_controller.router.assignment import Assigner, Directory, WorkerPicker
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.draining import hand_over
from outrider_controller.router.failover import FailoverState, Fault, Loss, fault_of, loss_of
from outrider_controller.router.fleet import DraftWorker, Fleet, Listener, TargetLink
from outrider_controller.router.placement import verification_mode
from outrider_controller.router.policy import Policy, target_states
from outrider_controller.router.request import BadReply, RequestState
from outrider_controller.router.sequences import (
    ActiveRequest,
    Answer,
    DraftSequence,
    NewResponse,
    RoundTimer,
    SequenceTable,
)
from outrider_controller.router.speculation import Allowance, SpeculationController
from outrider_controller.router.telemetry import RouterTelemetry
from outrider_controller.router.tracing import Recorder, Traces, now_us
from outrider_controller.router.usage import UsageSums

log = logging.getLogger(__name__)

# Of one target's sequences, those whose settings are decided on after one step; the others' turn comes. To decide costs
# as much as all else about a round, and where many share a target a few rounds' delay is little of an answer.
_DECISIONS_PER_STEP = 8
PLAN_EVERY_S = 1.0


class Dispatcher:
    """All requests of one router. Links and their tasks live while it is `running`."""

    def __init__(
        self,
        directory: Directory,
        config: RouterConfig,
        telemetry: RouterTelemetry,
        connect: Connect = create_channel,
        first_id: int | None = None,
    ) -> None:
        """`first_id`: of the sequences opened on workers; drawn if not given."""
        listener = Listener(lambda link: self.fleet.notify(), self._target_down, self._target_replied)
        self.fleet = Fleet(directory, config, listener, self._fleet_changed, connect)
        self.picker = WorkerPicker(self.fleet, directory, config.failover.draft_backoff_s)
        self.table = SequenceTable(telemetry, first_id)
        self.traces = Traces(config.traces)
        self.admission = AdmissionQueue(config.admission, self.fleet, telemetry)
        self.policy = Policy(config.policy)
        self.usage = UsageSums()
        self._assigner = Assigner(self.fleet, self.picker, self.table, self.policy, self.admission, config, telemetry)
        self._config = config
        self._telemetry = telemetry
        # In order of arrival: whoever came first is looked at first.
        self._active: dict[ActiveRequest, None] = {}
        self._num_runs = 0
        """Requests that have one of `_active`, wait for a place, or look for a target."""
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Dispatcher]:
        async with self.fleet.running(), beside(_keep_planning(self), "plan"):
            yield self

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def idle(self) -> None:
        """Returns once no request is left."""
        while self._num_runs:
            self._ended.clear()
            await self._ended.wait()

    async def run(self, request: Request, new_response: NewResponse, deadline_s: float | None = None) -> None:
        """Carries one request to its finish, telling each round in a message from `new_response`.

        `deadline_s`: seconds from now. Raises OutriderError. However it ends, every worker hears of it at once.
        """
        active: ActiveRequest | None = None
        reason, fault = sequence.CLOSE_REASON_CANCELLED, Cancelled.default_reason
        recorder = self.traces.start(request, now_us())
        self._num_runs += 1
        try:
            async with _within(deadline_s), self.admission.place(request, deadline_s) as until_s:
                active = await self._begin(request, new_response, recorder, until_s)
                while not active.state.finished:
                    await active.events.next()
                    await self._assigner.reopen(active)
        except OutriderError as error:
            fault = error.reason or error.default_reason
            if isinstance(error, DeadlineExceeded):
                reason = sequence.CLOSE_REASON_DEADLINE
            if active is None or active.untouched:
                self._telemetry.rejected(request.tenant, error)
            raise
        finally:
            if active is not None:
                self._end(active, reason)
            self._num_runs -= 1
            self._ended.set()
            self.traces.end(recorder, fault, now_us())

    async def _begin(
        self, request: Request, new_response: NewResponse, recorder: Recorder, room_until_s: float
    ) -> ActiveRequest:
        allowed = self.policy.allowance(request)
        target, draft = await self._assigner.choose(request, allowed, room_until_s)
        active = _active_request(request, self._config, allowed, target, draft, Answer(new_response), recorder)
        active.room_until_s = room_until_s
        self._active[active] = None
        self._assigner.open(active, target, draft)
        return active

    def _end(self, active: ActiveRequest, reason: sequence.CloseReason.ValueType) -> None:
        self._active.pop(active, None)
        self.table.drop_target(active, reason)
        self.table.drop_draft(active)

    # -- what targets say

    def _target_replied(self, link: TargetLink, reply: target_pb2.VerifyResponse) -> None:
        at_us, step_us, batch_sequences = now_us(), reply.step_us, reply.batch_sequences
        link.price.update(reply, at_us / 1e6)
        counted = []
        for commit in reply.commits:
            if active := self.table.at_target(link, commit.sequence_id):
                try:
                    done = active.apply(commit, step_us=step_us, now_us=at_us)
                except BadReply as bad:
                    self._lose_target(active, f"malformed reply: {bad}", Fault.WORKER)
                    continue
                setting = active.speculation.sent
                active.recorder.round(done, setting=setting, batch_sequences=batch_sequences, now_us=at_us)
                counted.append((active, active.draft, done))
                active.respond(commit, done)
                self.usage.round(active.request.tenant, commit, done, active.state.prompt_len)
                active.failover.round_committed()
                if done.finish_reason:
                    active.events.wake()
                    self.table.drop_target(active, None)
                    self.table.drop_draft(active)
            elif (tenant := self.table.tenant_of(commit.sequence_id)) is not None:
                self.usage.round(tenant, commit, Round.from_commit(commit, step_us))
        for used in reply.usage:
            if (tenant := self.table.tenant_of(used.sequence_id)) is not None:
                self.usage.ended(tenant, used)
        if counted:
            # What the clients hear of this step is on its way first.
            asyncio.get_running_loop().call_soon(self._steer, counted, at_us)
        for error in reply.errors:
            if active := self.table.at_target(link, error.sequence_id):
                self._target_refused(active, error)
        for error in reply.draft_errors:
            if active := self.table.at_draft_of(link, error.sequence_id):
                self._draft_failed(active, error)

    def _steer(self, counted: Sequence[tuple[ActiveRequest, DraftSequence | None, Round]], at_us: int) -> None:
        """What follows for speculation from one step's rounds, each with the draft that it had, if any."""
        self._telemetry.rounds([done for _, _, done in counted])
        turns = -(-len(counted) // _DECISIONS_PER_STEP)
        for active, draft, done in counted:
            if draft is None and active.lacks_draft:
                self.policy.missed(active.request, active.speculation.allowed.draft)
            if draft is None or active.draft is not draft:
                continue
            speculation = active.speculation
            if done.draft_active:
                speculation.draft_active(
                    done.answer_us, num_tokens=done.answer_tokens, compute_us=done.answer_compute_us
                )
            decides = turns == 1 or (active.failover.rounds_here + draft.sequence_id) % turns == 0
            was_low = speculation.window.low
            setting = speculation.committed(done, at_us, decides=decides)
            if speculation.window.low and not was_low:
                self._telemetry.low_acceptance(draft.worker.worker_id, active.request, speculation.window.acceptance)
            if setting is not None:
                self.table.set_speculation(active, setting)

    def target_states(self) -> dict[str, TargetState]:
        return target_states(self.fleet, now_us() / 1e6)

    def replan(self) -> None:
        self.plan_changed(self.policy.replan(self.target_states(), asyncio.get_running_loop().time()))

    def plan_changed(self, cells: Collection[Cell]) -> None:
        """What was decided anew holds for requests under way as for those to come."""
        for active in list(self._active) if cells else ():
            request = active.request
            if Cell(request.tenant, request.model) in cells:
                setting = active.speculation.allow(self.policy.allowance(request))
                if setting is not None:
                    self.table.set_speculation(active, setting)
                if active.lacks_draft:
                    active.events.wake()

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
        """The target goes on without. Another draft is looked for, or the same later."""
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
            hand_over(self.fleet, self.table, self._lose_target, time.time())
        self.admission.fleet_changed()
        if not self.picker.draft_has_room():
            return
        for active in self._active:
            if active.lacks_draft:
                active.events.wake()


def _active_request(
    request: Request,
    config: RouterConfig,
    allowed: Allowance,
    target: TargetLink,
    draft: DraftWorker | None,
    answer: Answer,
    recorder: Recorder,
) -> ActiveRequest:
    mode = verification_mode(
        temperature=request.sampling.temperature,
        seeded=request.seeded,
        draft_kind=draft.info.draft_kind if draft else None,
    )
    max_new_tokens, vocab_size, at_us = request.stopping.max_new_tokens, target.info.vocab_size, now_us()
    state = RequestState(request.prompt, max_new_tokens, vocab_size, list(request.resume))
    recorder.placed(state, mode, at_us)
    return ActiveRequest(
        request=request,
        state=state,
        mode=mode,
        speculation=SpeculationController(config.policy, allowed),
        failover=FailoverState(config.failover, request.resume_revision or target.info.model_revision),
        timer=RoundTimer(at_us),
        recorder=recorder,
        answer=answer,
    )


async def _keep_planning(dispatcher: Dispatcher) -> NoReturn:
    async def replan_and_rest() -> None:
        dispatcher.replan()
        await asyncio.sleep(PLAN_EVERY_S)

    def failed(error: Exception) -> None:
        log.error("planning failed", exc_info=error)

    # The last plan holds.
    await keep_running(replan_and_rest, Backoff(PLAN_EVERY_S, PLAN_EVERY_S), failed)


@asynccontextmanager
async def _within(deadline_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the block takes longer; None means that it may."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the request was finished") from None
