"""Finds workers for requests, waits while there is none, and has sequences opened on them.

`placement` ranks the workers and `failover` lists those that a request avoids. This module calls both, with the state
of the fleet and of its prefix caches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from outrider.errors import InternalError, Overloaded, Unavailable
from outrider.prefix import block_hashes
from outrider.protocol.pairs import compatibility_problem
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.speculation import Speculation

from outrider_controller.plan_messages import draft_version
from outrider_controller.router.admission.queue import AdmissionQueue
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.fleet.fleet import Fleet, LeasedDraft, TargetLink, WorkerLeases
from outrider_controller.router.fleet.placement import (
    PlacementCandidate,
    asked,
    common_draft_limit,
    rank,
    same_weights,
)
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import Recorder, now_us
from outrider_controller.router.observe.usage import CallBill
from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.failover import FailoverState, TargetKey, UnreachablePairs
from outrider_controller.router.request.state import RequestState
from outrider_controller.router.requests.sequences import ActiveRequest, NewResponse, RoundTimer, SequenceTable
from outrider_controller.router.speculation.controller import Allowance, SpeculationController
from outrider_controller.router.speculation.policy import Policy

log = logging.getLogger(__name__)

_NONE: Mapping[str, int] = {}


class Directory(WorkerLeases, Protocol):
    """The part of the metadata store that a router reads."""

    async def lookup_prefix(
        self, role: worker.WorkerRole.ValueType, hashes: Sequence[bytes], worker_ids: Collection[str]
    ) -> dict[str, int]: ...


class WorkerPicker:
    def __init__(self, fleet: Fleet, directory: Directory, first_backoff_s: float) -> None:
        self.unreachable = UnreachablePairs(first_backoff_s)
        self._fleet = fleet
        self._directory = directory
        self._warned: set[str] = set()

    async def target(self, request: Request, revision: str | None, avoided: set[TargetKey]) -> TargetLink | None:
        """The best live target of its model with room. `revision`: the one on which the request began."""
        links = {
            t.worker_id: t
            for t in self._fleet.live_targets(request.model)
            if t.key not in avoided and revision in (None, t.info.model_revision)
        }
        best = await self._best(worker.WORKER_ROLE_TARGET, links, request)
        return links[best] if best is not None and links[best].up else None

    def revisions_like(self, model: str, revision: str, avoided: set[TargetKey]) -> list[str]:
        """The revisions on which a request that began on `revision` may continue: the same one while any target has it,
        else all revisions with the same weights but another arithmetic."""
        live = self.live_revisions(model, avoided)
        return [revision] if revision in live else sorted(r for r in live if same_weights(r, revision))

    def live_revisions(self, model: str, avoided: set[TargetKey]) -> set[str]:
        return {t.info.model_revision for t in self._fleet.live_targets(model) if t.key not in avoided}

    async def draft(
        self,
        target: TargetLink,
        request: Request,
        avoided: set[str],
        together: Mapping[str, int],
        version: str | None = None,
    ) -> LeasedDraft | None:
        """The best draft with room that can work with this target, preferably of this version, and a candidate of no
        other.

        `together`: by draft, the number of this target's sequences that it drafts for.
        """
        drafts = {
            d.worker_id: d
            for d in self._fleet.drafts.values()
            if d.worker_id not in avoided and self.can_draft(d, target) and d.info.max_context_len > request.num_tokens
        }
        wanted = {key: d for key, d in drafts.items() if draft_version(d.info) == version}
        best = await self._best(worker.WORKER_ROLE_DRAFT, wanted, request, together) if wanted else None
        if best is None:
            others = {key: d for key, d in drafts.items() if not d.info.candidate}
            best = await self._best(worker.WORKER_ROLE_DRAFT, others, request, together)
        return drafts[best] if best is not None and drafts[best].leased else None

    def can_draft(self, draft: LeasedDraft, target: TargetLink) -> bool:
        """Whether the draft is live, takes work and fits this target, and their connection did not fail recently."""
        now_s = asyncio.get_running_loop().time()
        return (
            draft.leased
            and self._fleet.loads.takes_work(draft)
            and self._fits(target.info, draft.info)
            and not self.unreachable.avoids(target.worker_id, draft.worker_id, now_s)
        )

    def has_full_target(self, model: str) -> bool:
        return any(self._candidate(t).full for t in self._fleet.live_targets(model))

    def draft_has_room(self) -> bool:
        drafts = self._fleet.drafts.values()
        return any(d.leased and self._fleet.loads.takes_work(d) and not self._candidate(d).full for d in drafts)

    def models(self) -> list[router.ServedModel]:
        """The models that live targets serve, whether or not they take more work."""
        live: dict[str, list[worker.WorkerInfo]] = {}
        for target in self._fleet.targets.values():
            if target.up:
                live.setdefault(target.info.model, []).append(target.info)
        return [self._served(infos[0], infos) for _, infos in sorted(live.items())]

    def awaited_models(self) -> list[router.ServedModel]:
        """The models without a live target whose last one may be back soon."""
        now_s, live = asyncio.get_running_loop().time(), {t.info.model for t in self._fleet.targets.values() if t.up}
        return [
            self._served(info, [])
            for name, info in sorted(self._fleet.seen.items())
            if name not in live and now_s < self._fleet.back_until_s(name)
        ]

    def _served(self, info: worker.WorkerInfo, live: list[worker.WorkerInfo]) -> router.ServedModel:
        drafts = [d for d in self._fleet.drafts.values() if d.leased]
        return router.ServedModel(
            model=info.model,
            # A request may go to any of them.
            max_context_len=min(each.max_context_len for each in live or [info]),
            vocab_size=info.vocab_size,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            tokenizer_sha256=info.tokenizer_sha256,
            num_targets=len(live),
            num_drafts=sum(compatibility_problem(info, d.info) is None for d in drafts),
        )

    async def _best(
        self,
        role: worker.WorkerRole.ValueType,
        workers: Mapping[str, TargetLink] | Mapping[str, LeasedDraft],
        request: Request,
        together: Mapping[str, int] = _NONE,
    ) -> str | None:
        # Of a full one nobody has to know what it has cached.
        with_room = {worker_id: one for worker_id, one in workers.items() if not self._candidate(one).full}
        matched = await self._matches(role, with_room.values(), request) if len(with_room) > 1 else {}
        num_tokens = request.num_tokens
        candidates = [
            self._candidate(one, num_tokens, matched.get(worker_id, 0), together.get(worker_id, 0))
            for worker_id, one in with_room.items()
        ]
        # Shuffled first: routers that see the same ties must not all pick the same worker.
        random.shuffle(candidates)
        ranked = rank(candidates, request.expected_tokens)
        return ranked[0].worker_id if ranked else None

    async def _matches(
        self, role: worker.WorkerRole.ValueType, workers: Iterable[TargetLink | LeasedDraft], request: Request
    ) -> dict[str, int]:
        """Matched leading blocks per worker; the block size is part of a block's identity."""
        matched, token_ids = dict[str, int](), request.tokens
        for block_size in {one.info.block_size for one in workers} - {0}:
            if hashes := block_hashes(token_ids, block_size, request.salt):
                alike = [self._candidate(one) for one in workers if one.info.block_size == block_size]
                worker_ids = asked(hashes[0], alike, request.expected_tokens)
                matched.update(await self._directory.lookup_prefix(role, hashes, worker_ids))
        return matched

    def _candidate(
        self, one: TargetLink | LeasedDraft, num_tokens: int = 0, matched_blocks: int = 0, num_together: int = 0
    ) -> PlacementCandidate:
        load = self._fleet.loads.of(one)
        return PlacementCandidate(
            worker_id=one.worker_id,
            num_sequences=self._fleet.loads.num_elsewhere(one) + len(one.open_sequences),
            max_sequences=one.info.max_sequences,
            uncached_tokens=max(0, num_tokens - matched_blocks * one.info.block_size),
            prefill_token_ns=load.prefill_token_ns,
            row_ns=load.row_ns,
            num_waiting=load.num_waiting,
            num_together=num_together,
        )

    def _fits(self, target: worker.WorkerInfo, draft: worker.WorkerInfo) -> bool:
        problem = compatibility_problem(target, draft)
        if problem and problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s", problem)
        return problem is None


class Assigner:
    """Gives each request a target and a draft: when it begins, and again when it has lost one."""

    def __init__(
        self,
        fleet: Fleet,
        picker: WorkerPicker,
        table: SequenceTable,
        policy: Policy,
        admission: AdmissionQueue,
        config: RouterConfig,
        telemetry: RouterTelemetry,
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._picker = picker
        self._table = table
        self._admission = admission
        self._config = config
        self._telemetry = telemetry

    async def begin(
        self, request: Request, new_response: NewResponse, recorder: Recorder, bill: CallBill, room_until_s: float
    ) -> ActiveRequest:
        """Opens the request, which may look for room until `room_until_s`. Both workers prefill at the same time.

        Raises OutriderError when no target can be had.
        """
        before = self._policy.allowance(request)
        target, draft = await self._choose(request, before, room_until_s)
        # The plan may have changed during the search, and applies that to requests in the table only.
        allowed = self._policy.allowance(request)
        if not allowed.max_draft_tokens:
            draft = None
        active = _active_request(request, self._config, allowed, target, draft, new_response, recorder)
        active.bill, active.room_until_s = bill, room_until_s
        active.state.stats.num_on_as_auto = int(self._policy.counts_on_as_auto(request))
        self._table.requests[active] = None
        setting = active.speculation.lost() if draft is None else self._setting(active, target, draft)
        self._keep_revision(active, target)
        self._table.open(active, target, draft, setting)
        if allowed != before and active.lacks_draft:
            active.events.wake()
        return active

    def adopt(self, request: Request, link: TargetLink, sequence_id: int, recorder: Recorder) -> ActiveRequest:
        """A request that runs on an attached target. Raises InvalidRequest for an id that is open already."""
        allowed = self._policy.allowance(request)
        active = _active_request(request, self._config, allowed, link, None, router.RouteResponse, recorder)
        self._table.adopt(active, link, sequence_id)
        self._table.requests[active] = None
        self._table.set_speculation(active, active.speculation.lost())
        return active

    async def _choose(
        self, request: Request, allowed: Allowance, room_until_s: float
    ) -> tuple[TargetLink, LeasedDraft | None]:
        config = self._config.failover
        # What an operator has taken out of use does not come back by itself: the client hears of it before its stream
        # begins.
        out_of_use = not request.begun and self._fleet.cordoned(request.model)
        wait_s = config.wait_for_restart_s if request.begun else 0.0 if out_of_use else config.wait_for_target_s
        fresh = FailoverState(config, request.resume_revision)
        room_until_s = math.inf if request.begun else room_until_s
        target = await self._find_target(request, request.resume_revision or None, wait_s, fresh, room_until_s)
        draft = None
        if allowed.max_draft_tokens:
            draft = await self._picker.draft(target, request, set(), self._table.drafts_of(target), allowed.draft)
        return target, draft

    async def reopen(self, active: ActiveRequest) -> None:
        """Opens the request on a new target or draft where it lacks one. Raises OutriderError without a target."""
        if active.state.finished:
            return
        if active.target is None:
            await self._replace_target(active)
        await self.find_draft(active)

    async def find_draft(self, active: ActiveRequest) -> None:
        """Gives the request a draft if it may have one and has none."""
        if active.lacks_draft:
            await self._replace_draft(active)

    async def _replace_target(self, active: ActiveRequest) -> None:
        failover, wait_s = active.failover, self._config.failover.wait_for_restart_s
        await self._check_failures(failover)
        # A request with committed tokens is never dropped for load.
        room_until_s = active.room_until_s if active.untouched else math.inf
        target = await self._find_target(active.going_on, failover.revision, wait_s, failover, room_until_s)
        if failover.num_targets:
            active.state.stats.num_target_failovers += 1
            self._telemetry.failover("target")
        self._keep_revision(active, target)
        # The draft's sequence was opened by the previous target and is closed with that one.
        dropped = self._table.drop_draft(active)
        draft = dropped.worker if dropped is not None else None
        if draft is not None and not self._picker.can_draft(draft, target):
            draft = None
        speculation = active.speculation
        setting = speculation.lost() if draft is None else speculation.opened(speculation.workers_limit)
        self._table.open(active, target, draft, setting)

    async def _check_failures(self, failover: FailoverState) -> None:
        if failover.gives_up:
            raise InternalError(
                f"given up after {failover.num_failures} targets failed with this request", reason="TARGETS_FAILED"
            )
        if failover.suspects_network:
            # Other connections may be broken too, but not noticed yet: each would count as one more failure.
            await asyncio.sleep(self._config.failover.stall_after_s)

    def _keep_revision(self, active: ActiveRequest, target: TargetLink) -> None:
        """Records a change of revision, and so of arithmetic, for the client, the trace and operators."""
        before, revision = active.failover.revision, target.info.model_revision
        if revision != before:
            active.state.stats.num_revision_changes += 1
            self._telemetry.revision_changed(target.worker_id, active.request, before, revision)
            active.failover.revision = revision

    async def _find_target(
        self,
        request: Request,
        revision: str | None,
        wait_s: float,
        failover: FailoverState,
        room_until_s: float,
    ) -> TargetLink:
        """A live target with room. Waits `wait_s` for one to appear, or until a lost one may have restarted.

        Where all targets are full it waits until `room_until_s`: other routers' requests may have filled a target in
        which the queue saw room.
        """
        loop, model = asyncio.get_running_loop(), request.model
        asked_s = loop.time()
        while True:
            changed = self._fleet.changed()
            target = await self._look_for_target(request, revision, failover)
            if target is not None:
                return target
            give_up_s = max(asked_s + wait_s, self._fleet.back_until_s(model))
            full = bool(failover.full_targets) or self._picker.has_full_target(model)
            if full and loop.time() >= room_until_s:
                retry_after_s = self._admission.retry_after_s(request)
                raise Overloaded(f"every target of {model!r} is full", retry_after_s=retry_after_s)
            if self._fleet.cut_off(model):
                raise no_target_reached(model)
            # With committed tokens it has no end, and the full ones may be of another revision than it needs.
            awaits_room = full and room_until_s < math.inf
            if not awaits_room and loop.time() >= give_up_s:
                raise self._no_target(model, revision)
            # Not wait_for: in Python 3.11 it can swallow a cancellation, and the call would live on without a caller.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(room_until_s if awaits_room else give_up_s):
                    await changed.wait()
            failover.full_targets.clear()

    def _no_target(self, model: str, revision: str | None) -> Unavailable:
        why = f"no target of {model!r} is up"
        if revision is not None and (live := self._picker.live_revisions(model, set())):
            why = f"no target of {model!r} has revision {revision}; there is {', '.join(sorted(live))}"
        if self._fleet.cordoned(model):
            why = f"every target of {model!r} is cordoned: an operator has taken it out of use"
        return Unavailable(why, reason="NO_TARGET", retry_after_s=self._config.failover.wait_for_target_s)

    async def _look_for_target(
        self, request: Request, revision: str | None, failover: FailoverState
    ) -> TargetLink | None:
        excluded, last_resort = failover.excluded_targets, failover.failed_targets
        revisions = [None] if revision is None else self._picker.revisions_like(request.model, revision, excluded)
        for avoided in (excluded | last_resort, excluded) if last_resort else (excluded,):
            for allowed in revisions:
                target = await self._picker.target(request, allowed, avoided)
                if target is not None:
                    return target
        return None

    async def _replace_draft(self, active: ActiveRequest) -> None:
        if active.target is None or not active.failover.may_draft:
            return
        link = active.target.link
        draft = await self._picker.draft(
            link,
            active.going_on,
            active.failover.avoided_drafts,
            self._table.drafts_of(link),
            active.speculation.allowed.draft,
        )
        # During the search the target may have been lost, or the request may have finished.
        if draft is None or active.target is None or not active.lacks_draft:
            return
        if active.failover.num_drafts:
            active.state.stats.num_draft_failovers += 1
            self._telemetry.failover("draft")
        self._table.set_draft(active, draft, self._setting(active, active.target.link, draft))

    def _setting(self, active: ActiveRequest, target: TargetLink, draft: LeasedDraft) -> Speculation:
        record = self._policy.record(active.request.tenant, active.request.model, draft.info)
        return active.speculation.opened(common_draft_limit(target.info, draft.info), record)


def no_target_reached(model: str) -> Unavailable:
    """Another router may reach one: gateways know the reason."""
    return Unavailable(f"no target of {model!r} can be reached from here", reason="NO_TARGET_REACHED")


def _active_request(
    request: Request,
    config: RouterConfig,
    allowed: Allowance,
    target: TargetLink,
    draft: LeasedDraft | None,
    new_response: NewResponse,
    recorder: Recorder,
) -> ActiveRequest:
    at_us = now_us()
    state = RequestState(request, target.info.vocab_size)
    recorder.placed(state, at_us)
    return ActiveRequest(
        request=request,
        state=state,
        speculation=SpeculationController(config.policy, allowed),
        failover=FailoverState(config.failover, request.resume_revision or target.info.model_revision),
        timer=RoundTimer(at_us),
        recorder=recorder,
        new_response=new_response,
    )
