"""The operators' calls on drafts: list and delete versions, start and end rollouts. Each field is checked here."""

from __future__ import annotations

import asyncio
import time

from outrider.errors import Conflict, InvalidRequest, NotFound
from outrider.metadata import MetadataStore
from outrider.metadata.drafts import DraftStore
from outrider.metadata.event_writer import EventWriter
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import drafts_pb2 as drafts
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.rollout import DEFAULT_SHARE, MAX_SHARE, Stage
from outrider_controller.control.api.tenants import caller, check_name
from outrider_controller.control.plan.draft_versions import named
from outrider_controller.control.plan.rollouts import action, stage_of, tell
from outrider_controller.plan_messages import draft_version


class Releases:
    """Keeps no state. Every call raises Unavailable while the store is away."""

    def __init__(
        self,
        store: DraftStore,
        leases: MetadataStore,
        events: EventWriter,
    ) -> None:
        self._store = store
        self._leases = leases
        self._events = events

    async def ListDrafts(self, request: control.ListDraftsRequest, _: object) -> control.ListDraftsResponse:
        """Raises NotFound and InvalidRequest for the draft asked for."""
        versions, rollouts, evidence = await asyncio.gather(
            self._store.versions(), self._store.rollouts(), self._store.evidence()
        )
        live = await self._live()
        for one in versions:
            one.num_workers = len(live.get(one.version, ()))
            if (rollout := rollouts.get(one.version)) is not None:
                one.rollout.CopyFrom(with_evidence(rollout, evidence))
        if request.draft:
            return control.ListDraftsResponse(drafts=[named(request.draft, versions)])
        versions.sort(key=lambda one: (one.name, -one.first_seen_unix_ms))
        return control.ListDraftsResponse(drafts=versions)

    async def covering(self, tenant: str) -> list[drafts.Rollout]:
        """The rollouts that include the tenant's requests, by draft version."""
        rollouts, evidence = await asyncio.gather(self._store.rollouts(), self._store.evidence())
        found = [one for one in rollouts.values() if stage_of(one).covers(tenant)]
        return [with_evidence(one, evidence) for one in sorted(found, key=lambda one: one.draft)]

    async def StartRollout(self, request: control.StartRolloutRequest, _: object) -> control.StartRolloutResponse:
        share = request.share if request.HasField("share") else DEFAULT_SHARE
        if not 0 < share <= MAX_SHARE:
            raise InvalidRequest("share", f"{share:g} is not above 0 and at most {MAX_SHARE:g}")
        if request.tenant:
            check_name("tenant", request.tenant)
        draft = named(request.draft, await self._store.versions()).version
        await self._check_candidate(draft)
        rollouts = await self._store.rollouts()
        _check_shares(share, [one for one in rollouts.values() if one.draft != draft])
        before, now_ms = rollouts.get(draft, drafts.Rollout()), round(time.time() * 1000)
        goes_on = before.state == drafts.ROLLOUT_STATE_RUNNING and before.tenant == request.tenant
        rollout = drafts.Rollout(
            draft=draft,
            tenant=request.tenant,
            share=share,
            state=drafts.ROLLOUT_STATE_RUNNING,
            reason="an operator started it",
            by=caller(),
            started_unix_ms=before.started_unix_ms if goes_on else now_ms,
            changed_unix_ms=now_ms,
        )
        await self._put(rollout, before)
        return control.StartRolloutResponse(rollout=rollout)

    async def EndRollout(self, request: control.EndRolloutRequest, _: object) -> control.EndRolloutResponse:
        """Raises NotFound for a draft that was never rolled out."""
        draft = named(request.draft, await self._store.versions()).version
        before, rollout = (await self._store.rollouts()).get(draft), drafts.Rollout()
        if before is None:
            raise NotFound(f"{draft} was never rolled out", reason="NO_ROLLOUT", field="draft")
        rollout.CopyFrom(before)
        rollout.state = drafts.ROLLOUT_STATE_PROMOTED if request.promote else drafts.ROLLOUT_STATE_UNDONE
        rollout.reason, rollout.by = "an operator ended it", caller()
        rollout.changed_unix_ms = round(time.time() * 1000)
        await self._put(rollout, before)
        return control.EndRolloutResponse(rollout=rollout)

    async def DeleteDraft(self, request: control.DeleteDraftRequest, _: object) -> control.DeleteDraftResponse:
        """Raises NotFound and InvalidRequest, also for a version that a worker runs."""
        found = named(request.draft, await self._store.versions())
        if live := len((await self._live()).get(found.version, ())):
            raise InvalidRequest("draft", f"{live} workers run {found.version}: stop them first", reason="DRAFT_RUNS")
        if not await self._store.delete_version(found.version, by=caller()):
            raise NotFound(f"{found.version} is deleted already", reason="UNKNOWN_DRAFT", field="draft")
        return control.DeleteDraftResponse(draft=found)

    async def _put(self, rollout: drafts.Rollout, before: drafts.Rollout) -> None:
        if not await self._store.put_rollout(rollout, action(rollout), before):
            raise Conflict(f"the rollout of {rollout.draft} was changed meanwhile", reason="ROLLOUT_CHANGED")
        tell(rollout, self._events)

    async def _check_candidate(self, draft: str) -> None:
        live = (await self._live()).get(draft, [])
        if not live:
            raise InvalidRequest("draft", f"no worker runs {draft}", reason="NO_DRAFT")
        if not all(info.candidate for info in live):
            message = f"{draft} drafts for everybody: start its workers with --candidate"
            raise InvalidRequest("draft", message, reason="NO_CANDIDATE")

    async def _live(self) -> dict[str, list[worker.WorkerInfo]]:
        found: dict[str, list[worker.WorkerInfo]] = {}
        for record in await self._leases.workers(worker.WORKER_ROLE_DRAFT):
            found.setdefault(draft_version(record.info), []).append(record.info)
        return found


def with_evidence(rollout: drafts.Rollout, evidence: dict[str, drafts.RolloutEvidence]) -> drafts.Rollout:
    known = evidence.get(rollout.draft)
    if known is not None and known.started_unix_ms == rollout.started_unix_ms:
        rollout.evidence.CopyFrom(known)
    return rollout


def _check_shares(share: float, others: list[drafts.Rollout]) -> None:
    taken = sum(one.share for one in others if stage_of(one).stage is Stage.RUNNING)
    if share + taken > MAX_SHARE:
        message = f"{share:g}, beside {taken:g} of other rollouts that run; at most {MAX_SHARE:g} together"
        raise InvalidRequest("share", message)
