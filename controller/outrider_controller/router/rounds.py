"""The pump: commits from targets go to clients, and what breaks is opened elsewhere.

Replies are handled where they arrive, without waiting and without waking a task: all that one engine step says goes out
in one message to each gateway. Only the search for another worker waits, in the task of the request
concerned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    OutriderError,
    Overloaded,
    Unavailable,
)
from outrider.protocol import logprobs
from outrider.protocol.errors import from_sequence_error
from outrider.protocol.rounds import Round
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from outrider_controller.router import clock
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.course import Course, DraftOpening, NewResponse
from outrider_controller.router.faults import Fault, Loss, fault_of, loss_of
from outrider_controller.router.links import Connect, Listener, TargetLink
from outrider_controller.router.notices import Notices
from outrider_controller.router.openings import Openings
from outrider_controller.router.pairing import verification_mode
from outrider_controller.router.policy import PLAIN, Pace, draft_token_limit
from outrider_controller.router.pools import Directory, DraftWorker, LinkKey, Pools, Prefix
from outrider_controller.router.session import BadReply, Request, Session
from outrider_controller.router.traces import Recorder, Traces

# Of one target's sequences, those whose settings are decided on after one step; the others' turn comes. To decide costs
# as much as all else about a round, and where many share a target a few rounds' delay is little of an answer.
_DECISIONS_PER_STEP = 8


class Rounds:
    """All sessions of one router. `async with` it: links and their tasks live inside."""

    def __init__(
        self,
        directory: Directory,
        config: RouterConfig,
        notices: Notices,
        connect: Connect = create_channel,
        first_id: int | None = None,
    ) -> None:
        """`first_id`: of the sequences opened on workers; drawn if not given."""
        self.pools = Pools(
            directory,
            config,
            Listener(self._link_up, self._target_down, self._target_replied),
            self._pools_changed,
            connect,
        )
        self.traces = Traces(config.traces)
        self._config = config
        self._notices = notices
        # In order of arrival: whoever came first is looked at first.
        self._courses: dict[Course, None] = {}
        self._ended = asyncio.Event()
        self._openings = Openings(notices, first_id)

    async def __aenter__(self) -> Rounds:
        await self.pools.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pools.__aexit__()

    @property
    def num_sessions(self) -> int:
        return len(self._courses)

    async def idle(self) -> None:
        """Returns once no session is left."""
        while self._courses:
            self._ended.clear()
            await self._ended.wait()

    # -- driving one request

    async def run(self, request: Request, new_response: NewResponse, deadline_s: float | None = None) -> None:
        """Carries one request to its finish, telling each round in a message from `new_response`.

        `deadline_s`: seconds from now. Raises OutriderError. However it ends, every worker hears of it at once.
        """
        course: Course | None = None
        reason, fault = sequence.CLOSE_REASON_CANCELLED, Cancelled.default_reason
        recorder = self.traces.start(request, clock.now_us())
        try:
            async with _within(deadline_s):
                course = await self._begin(request, new_response, recorder)
                await self._drive(course)
        except OutriderError as error:
            fault = error.reason or error.default_reason
            if isinstance(error, DeadlineExceeded):
                reason = sequence.CLOSE_REASON_DEADLINE
            if course is None or course.untouched:
                self._notices.rejected(request.tenant, error)
            raise
        finally:
            if course is not None:
                self._end(course, reason)
            self.traces.end(recorder, fault, clock.now_us())

    async def _drive(self, course: Course) -> None:
        while not course.session.finished:
            event = await course.next_event()
            if isinstance(event, OutriderError):
                raise event
            await self._place(course)

    async def _begin(self, request: Request, new_response: NewResponse, recorder: Recorder) -> Course:
        """Chooses a target and a draft, then opens the sequence on both: both prefill at once."""
        prefix = Prefix((*request.prompt, *request.resume), request.cache_salt)
        target = await self._first_target(request, prefix)
        limit = draft_token_limit(
            self._config.policy,
            wanted=request.speculation != router.SPECULATION_MODE_OFF,
            requested=request.max_draft_tokens,
        )
        draft = None
        if limit:
            draft = await self.pools.choose_draft(target, prefix, (), self._openings.drafts_of(target))
        course = self._new_course(request, new_response, target, draft, limit, recorder)
        self._courses[course] = None
        self._open(course, target, draft)
        return course

    def _new_course(
        self,
        request: Request,
        new_response: NewResponse,
        target: TargetLink,
        draft: DraftWorker | None,
        limit: int,
        recorder: Recorder,
    ) -> Course:
        mode = verification_mode(
            temperature=request.sampling.temperature,
            seeded=request.seeded,
            draft_kind=draft.info.draft_kind if draft else None,
        )
        session = Session(request, mode, target.info.vocab_size, opened_us=clock.now_us())
        recorder.placed(session)
        return Course(
            session,
            recorder,
            Pace(self._config.policy, limit, insistent=request.speculation == router.SPECULATION_MODE_ON),
            new_response,
            limit,
            request.resume_revision or target.info.model_revision,
        )

    def _open(self, course: Course, target: TargetLink, draft: DraftWorker | None) -> None:
        setting = PLAIN
        if draft is not None:
            setting = course.pace.opened(
                _draft_limit(course, target, draft), draft.standing(course.session.request.tenant)
            )
        self._keep_revision(course, target)
        self._openings.open(course, target, draft, setting)

    async def _place(self, course: Course) -> None:
        """Opens the session where it is missing. Raises when no target can be had."""
        if course.session.finished:
            return
        if course.target is None:
            await self._replace_target(course)
        if course.lacks_draft:
            await self._replace_draft(course)

    async def _first_target(self, request: Request, prefix: Prefix) -> TargetLink:
        def turned_away() -> OutriderError | None:
            if not self.pools.has_full_target(request.model):
                return None
            return Overloaded(
                f"every target of {request.model!r} is full", retry_after_s=self._config.admission.retry_after_s
            )

        config = self._config.failover
        # What another router had begun goes on here.
        wait_s = config.wait_to_resume_s if request.resume else config.wait_for_target_s
        revision = request.resume_revision or None
        return await self._find_target(request.model, revision, prefix, wait_s, lambda: (set(), set()), turned_away)

    async def _replace_target(self, course: Course) -> None:
        await self._endure_failures(course)
        target = await self._find_target(
            course.session.request.model,
            course.revision,
            course.prefix,
            self._config.failover.wait_to_resume_s,
            lambda: (course.left_targets | course.refused_by, course.failed_targets),
            lambda: self._refused_everywhere(course),
        )
        if course.num_targets:
            course.session.metrics.num_target_failovers += 1
            self._notices.failover("target")
        self._keep_revision(course, target)
        # It was open there for the target before, and is closed with it.
        dropped = self._openings.drop_draft(course)
        draft = dropped.worker if dropped is not None else None
        if draft is not None and not self.pools.can_draft(draft, target):
            draft = None
        self._openings.open(course, target, draft, course.pace.opened(course.pace.limit) if draft else PLAIN)

    def _keep_revision(self, course: Course, target: TargetLink) -> None:
        """Where the answer goes on in another arithmetic, that is said: to the client, in the trace, to operators."""
        revision = target.info.model_revision
        if revision == course.revision:
            return
        course.session.metrics.num_revision_changes += 1
        self._notices.revision_changed(target.worker_id, course.session.request, course.revision, revision)
        course.revision, course.told_revision = revision, False

    async def _endure_failures(self, course: Course) -> None:
        """Raises when so many targets failed with this request that it must be the cause."""
        config = self._config.failover
        failures, lost = course.target_failures, course.lost_connections
        if failures >= config.max_target_failures or lost >= config.max_lost_connections:
            raise InternalError(
                f"given up after {failures + lost} targets failed with this request", reason="TARGETS_FAILED"
            )
        if lost > 1:
            # It may be our own network: then all connections break at once, but are not noticed at once. A target that
            # is still thought to be up would be lost next, and after it this request.
            await asyncio.sleep(config.stall_after_s)

    def _refused_everywhere(self, course: Course) -> OutriderError | None:
        if course.untouched and course.refused_by:
            return Overloaded("no target has room", retry_after_s=self._config.admission.retry_after_s)
        # An accepted request asks again, for as long as it waits at all.
        course.refused_by.clear()
        return None

    async def _find_target(
        self,
        model: str,
        revision: str | None,
        prefix: Prefix,
        wait_s: float,
        avoid: Callable[[], tuple[set[LinkKey], set[LinkKey]]],
        turned_away: Callable[[], OutriderError | None],
    ) -> TargetLink:
        """A live target with room; waits so long for one to appear.

        `avoid` names those that will not do, and those that will only where there is no other.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while True:
            changed = self.pools.changed()
            unfit, last_resort = avoid()
            revisions = [None] if revision is None else self.pools.revisions_like(model, revision, unfit)
            for avoided in (unfit | last_resort, unfit) if last_resort else (unfit,):
                for allowed in revisions:
                    target = await self.pools.choose_target(model, allowed, prefix, avoided)
                    if target is not None:
                        return target
            if refusal := turned_away():
                raise refusal
            if loop.time() >= give_up_s:
                raise Unavailable(f"no target of {model!r} is up", reason="NO_TARGET")
            # Not wait_for: in Python 3.11 it can swallow a cancellation, and the call would live on without a caller.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await changed.wait()

    async def _replace_draft(self, course: Course) -> None:
        if course.target is None or course.draft_failures >= self._config.failover.max_draft_failures:
            return
        link = course.target.link
        drafts = self._openings.drafts_of(link)
        draft = await self.pools.choose_draft(link, course.prefix, course.avoid_drafts, drafts)
        # The search waited: the target may be gone, the session finished.
        if draft is None or course.target is None or not course.lacks_draft:
            return
        setting = course.pace.opened(
            _draft_limit(course, course.target.link, draft), draft.standing(course.session.request.tenant)
        )
        if course.num_drafts:
            course.session.metrics.num_draft_failovers += 1
            self._notices.failover("draft")
        self._openings.set_draft(course, draft, setting)

    def _end(self, course: Course, reason: sequence.CloseReason.ValueType) -> None:
        self._courses.pop(course, None)
        self._ended.set()
        self._openings.drop_target(course, reason)
        self._openings.drop_draft(course)

    # -- what targets say

    def _target_replied(self, link: TargetLink, reply: target_pb2.VerifyResponse) -> None:
        now_us, step_us, batch_sequences = clock.now_us(), reply.step_us, reply.batch_sequences
        counted = []
        for commit in reply.commits:
            if course := self._openings.at_target(link, commit.sequence_id):
                try:
                    done = course.session.apply(commit, step_us=step_us, now_us=now_us)
                except BadReply as bad:
                    self._lose_target(course, f"malformed reply: {bad}", Fault.WORKER)
                    continue
                setting = course.pace.sent
                course.recorder.round(done, setting=setting, batch_sequences=batch_sequences, now_us=now_us)
                counted.append((course, course.draft, done))
                self._committed(course, commit, done)
        if counted:
            # What the clients hear of this step is on its way first.
            asyncio.get_running_loop().call_soon(self._think_over, link, counted, now_us)
        for error in reply.errors:
            if course := self._openings.at_target(link, error.sequence_id):
                self._target_refused(course, error)
        for error in reply.draft_errors:
            if course := self._openings.at_draft_of(link, error.sequence_id):
                self._draft_failed(course, error)

    def _committed(self, course: Course, commit: sequence.Commit, done: Round) -> None:
        session = course.session
        response = course.new_response()
        if not course.told_revision:
            response.model_revision, course.told_revision = course.revision, True
        session.tell(done, response)
        if session.request.logprobs is not None:
            logprobs.pass_on(commit, response)
        course.carried_on()
        if done.finish_reason:
            course.wake()
            self._openings.drop_target(course, None)
            self._openings.drop_draft(course)

    def _think_over(
        self, link: TargetLink, counted: Sequence[tuple[Course, DraftOpening | None, Round]], now_us: int
    ) -> None:
        """What follows from one step's rounds, of which each was drafted for by the opening given, if any."""
        self._notices.rounds([done for _, _, done in counted])
        turns = -(-len(counted) // _DECISIONS_PER_STEP)
        for course, draft, done in counted:
            if draft is None or course.draft is not draft:
                continue
            if done.draft_active:
                course.pace.draft_active(
                    done.answer_us, num_tokens=done.answer_tokens, compute_us=done.answer_compute_us
                )
            decides = turns == 1 or (course.rounds_here + draft.sequence_id) % turns == 0
            setting = course.pace.committed(done, now_us, decides=decides)
            if setting is not None:
                self._openings.set_speculation(course, setting)

    def _target_refused(self, course: Course, message: sequence.SequenceError) -> None:
        error = from_sequence_error(message)
        fault = fault_of(error.code)
        if fault is Fault.REQUEST:
            self._openings.drop_target(course, None)
            course.events.put_nowait(error)
            return
        self._lose_target(course, str(error), fault)

    def _target_down(self, link: TargetLink) -> None:
        for sequence_id in tuple(link.open_sequences):
            self._lose_target(self._openings.by_target[sequence_id], link.problem, Fault.CONNECTION)
        self.pools.notify()

    def _lose_target(self, course: Course, why: str, fault: Fault) -> None:
        opening = self._openings.drop_target(course, sequence.CLOSE_REASON_MOVED)
        if opening is None:
            return
        if fault is Fault.FULL:
            course.refused_by.add(opening.link.key)
        elif fault is Fault.LEAVING:
            course.left_targets.add(opening.link.key)
        else:
            course.failed_targets.add(opening.link.key)
        course.target_failures += fault is Fault.WORKER
        course.recorder.lost(opening.link.info, fault.value, clock.now_us())
        course.lost_connections += fault is Fault.CONNECTION
        self._notices.lost_target(opening.link.worker_id, course.session.request, fault, why)
        course.wake()

    def _draft_failed(self, course: Course, message: sequence.SequenceError) -> None:
        """The target goes on without. Another draft is looked for, or the same later."""
        loss = loss_of(message.reason, names_field=bool(message.field))
        target, opening = course.target, self._openings.drop_draft(course)
        assert target is not None and opening is not None
        if loss in (Loss.UNREACHABLE, Loss.WORKER):
            now_s = asyncio.get_running_loop().time()
            self.pools.unreachable.failed(target.link.worker_id, opening.worker.worker_id, now_s)
        else:
            course.avoid_drafts.add(opening.worker.worker_id)
        # Where there was no connection, nothing is known against the request.
        course.draft_failures += loss is not Loss.UNREACHABLE
        self._openings.set_speculation(course, course.pace.lost())
        course.recorder.lost(opening.worker.info, loss.value, clock.now_us())
        why = str(from_sequence_error(message))
        self._notices.lost_draft(opening.worker.worker_id, course.session.request, loss, why)
        course.wake()

    # -- the rest

    def _link_up(self, link: TargetLink) -> None:
        self.pools.notify()

    def _pools_changed(self) -> None:
        if not self.pools.draft_has_room():
            return
        for course in self._courses:
            if course.lacks_draft:
                course.wake()


@asynccontextmanager
async def _within(deadline_s: float | None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the block takes longer; None means that it may."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the request was finished") from None


def _draft_limit(course: Course, target: TargetLink, draft: DraftWorker) -> int:
    """What the request may have, lowered to what both workers can do. A worker that names 0 names no limit."""
    limits = (course.draft_limit, target.info.max_draft_tokens, draft.info.max_draft_tokens)
    return min(limit for limit in limits if limit)
