"""The plan of the whole cluster, made by the control plane that leads. What it decides goes to all routers.

Beliefs and modes are kept in the metadata store, so that the next leader goes on from them. One that cannot reach the
store goes on leading while its routers cannot either: nobody else could take over. Where they can, it is cut off, and
gives way: another one may lead by now, whose routers and operators these would not be.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import NoReturn, Protocol

from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.metadata.leader import LEADER_TTL_S, LeaderLease
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.supervision import Backoff, keep_running

from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import Decision
from outrider_controller.autoscaler.planner import ANYBODY, Planner
from outrider_controller.control.alerts import Alerts, Change
from outrider_controller.control.demand import Demand
from outrider_controller.control.fleet import Leases
from outrider_controller.control.followers import Follower, Followers, not_leading
from outrider_controller.control.policies import Overrides, TenantPolicies, Tenants
from outrider_controller.plan_messages import (
    beliefs_from_proto,
    decision_from_proto,
    decision_to_proto,
    draft_version,
    evidence_from_proto,
    reported_state,
)

log = logging.getLogger(__name__)

# How long a change by an operator at another control plane may go unseen.
_TICK_S = 0.5
_PLAN_EVERY_S = 1.0
_SAVE_EVERY_S = 2.0
# Without the lease for so long, another one may have led for a while.
_CUT_OFF_S = 2 * LEADER_TTL_S
# Changes of mode with an event and a log line each, of one plan.
_MAX_ANNOUNCED = 8


Report = Callable[[Iterable[Change]], None]


class Plans(Overrides, Protocol):
    """The part of the metadata store that keeps plans."""

    def lease(self, holder: str) -> LeaderLease: ...

    async def save(self, epoch: int, decisions: Iterable[policy.TenantDecision]) -> bool: ...

    async def load(self) -> list[policy.TenantDecision] | None: ...

    async def find(self, tenant: str, targets: Iterable[str]) -> list[policy.TenantDecision] | None: ...


class PlanLeader:
    """One control plane's part in the plan: it leads, or stands by."""

    def __init__(
        self,
        worker_id: str,
        plans: Plans,
        records: Tenants,
        events: EventWriter,
        demand: Demand,
        leases: Leases,
        report: Report = lambda changes: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`report` is called with alerts that go up or come down."""
        self.alerts = Alerts()
        self.epoch = 0
        """0 while another leads."""
        self.followers = Followers()
        self._worker_id = worker_id
        self._plans = plans
        self._events = events
        self._report = report
        self._demand = demand
        self._leases = leases
        self._clock = clock
        self._lease = plans.lease(worker_id)
        self._planner = Planner()
        self._policies = TenantPolicies(plans, records)
        self._planned_s = self._saved_s = float("-inf")
        self._unsaved: set[Cell] = set()
        self._wake = asyncio.Event()

    async def run(self) -> NoReturn:
        async def tick_and_rest() -> None:
            await self.tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()

        def failed(error: Exception) -> None:
            log.error("planning failed", exc_info=error)

        try:
            await keep_running(tick_and_rest, Backoff(_TICK_S, _TICK_S), failed)
        finally:
            if self.epoch:
                self._end_alerts()
                await self._save()
                await self._lease.resign()

    def changed(self) -> None:
        """An operator has set something: it is read and decided on at once."""
        self._policies.outdated()
        self._planned_s = float("-inf")
        self._wake.set()

    # -- routers

    def follow(self, seen_epoch: int = 0) -> Follower:
        """With every decision to send first. Raises Unavailable where another leads.

        `seen_epoch`: the highest that the router has received. Where the store has lost its memory that may be above
        ours, and the router would refuse what we send: a higher epoch is taken before it may follow.
        """
        if self.epoch < seen_epoch:
            self._lease.saw(seen_epoch)
            self._wake.set()
            raise not_leading()
        if not self.epoch:
            raise not_leading()
        follower = Follower()
        follower.send(self._messages(self._planner.decisions()))
        self.followers.add(follower)
        return follower

    def received(self, follower: Follower, message: policy.FollowRequest) -> None:
        evidence = dict(one for each in message.evidence if (one := evidence_from_proto(each)) is not None)
        self._planner.learn(evidence)
        self.alerts.learn(evidence)
        self._demand.learn(evidence)
        self._unsaved.update(pairing.cell for pairing in evidence)
        follower.states = {target.model: reported_state(target) for target in message.targets}
        follower.busy, follower.reaches_store = message.busy, message.reaches_store

    # -- operators

    async def explain(self, tenant: str) -> tuple[list[policy.TenantDecision], bool]:
        """Its decisions by target, and whether it is known. Where another leads: as that one wrote them last.

        Raises Unavailable where they cannot be read.
        """
        targets = () if self.epoch else await self._models()
        own = await self._decided(tenant, targets)
        found = own or await self._decided(ANYBODY, targets)
        return sorted(found, key=lambda one: one.target), any(one.rounds for one in own)

    async def _models(self) -> Iterable[str]:
        """Of the live targets."""
        return {one.info.model for one in await self._leases.workers() if one.info.role == worker.WORKER_ROLE_TARGET}

    async def _decided(self, tenant: str, targets: Iterable[str]) -> list[policy.TenantDecision]:
        if self.epoch:
            return list(self._messages(self._planner.decisions(tenant)).values())
        kept = await self._plans.find(tenant, targets)
        if kept is None:
            raise not_leading()
        return kept

    # -- time

    async def tick(self) -> None:
        """Leads on, takes over, or stands by; plans where it is time."""
        epoch = await self._lease.hold()
        if self.epoch and (epoch == 0 or (epoch is None and self._cut_off)):
            self._step_down("another control plane leads" if epoch == 0 else "cut off from the metadata store")
        elif epoch and epoch != self.epoch:
            await self._take_over(epoch)
        if self.epoch:
            now_s = self._clock()
            if await self._policies.read(now_s, self.epoch) or now_s - self._planned_s >= _PLAN_EVERY_S:
                self._planned_s = now_s
                if self._policies.deleted:
                    await self._forget(self._policies.deleted)
                self._plan(now_s)
            self._demand.look(await self._draft_workers(), [one.busy for one in self.followers], now_s)
            if now_s - self._saved_s >= _SAVE_EVERY_S:
                self._saved_s = now_s
                await self._save()

    async def _take_over(self, epoch: int) -> None:
        if not self.epoch:
            kept = await self._plans.load()
            if kept is None:
                return
            decisions = dict(decision_from_proto(one) for one in kept)
            self._planner = Planner()
            beliefs = [belief for one in kept for belief in beliefs_from_proto(one)]
            self._planner.resume(decisions, beliefs, self._clock())
            self._policies.outdated()
            self._planned_s = float("-inf")
            self._events.emit(EventKind.LEADER_CHANGED, {"worker_id": self._worker_id, "epoch": epoch})
            log.info("leads, epoch %d: %d decisions go on", epoch, len(decisions))
        else:
            # The store lost its memory.
            self._unsaved.update(self._planner.plan.cells)
            await self._policies.restore()
        self.epoch = epoch

    @property
    def _cut_off(self) -> bool:
        """The store is there, though not for this process. What routers report of it may be a second old."""
        return self._lease.unrenewed_s > _CUT_OFF_S and self.followers.reach_store

    def _step_down(self, why: str) -> None:
        log.warning("leads no more: %s", why)
        self.epoch = 0
        self._end_alerts()
        self._demand.stop()
        self.followers.end()

    def _end_alerts(self) -> None:
        """Whoever leads next raises its own."""
        self._report(self.alerts.end("the control plane that raised it leads no more"))
        self.alerts = Alerts()

    async def _forget(self, tenants: Collection[str]) -> None:
        """They were deleted: another one of the same name begins as everybody."""
        gone = self._planner.forget(tenants)
        self._unsaved.difference_update(gone)
        self.followers.send(
            {cell: policy.TenantDecision(tenant=cell.tenant, target=cell.target, removed=True) for cell in gone}
        )
        await self._policies.forgotten()

    async def _draft_workers(self) -> Counter[str]:
        drafts = [one.info for one in await self._leases.workers() if one.info.role == worker.WORKER_ROLE_DRAFT]
        return Counter(map(draft_version, drafts))

    def _plan(self, now_s: float) -> None:
        states = self.followers.states()
        self._report(self.alerts.step({model: state.price for model, state in states.items()}, now_s))
        if not states:
            # No router has reported yet what there is: who took over keeps what was decided.
            return
        before = self._planner.plan
        changed = self._planner.step(self._policies.by_tenant(), states, now_s)
        self._unsaved.update(changed)
        self.followers.send(self._messages(changed))
        num_announced = 0
        for cell, decision in changed.items():
            known = before.index.get(cell)
            if known is None or before.mode[known] == decision.mode or not cell.tenant:
                continue
            self.alerts.mode_changed(cell)
            if num_announced < _MAX_ANNOUNCED:
                num_announced += 1
                self._announce(cell, decision)

    def _announce(self, cell: Cell, decision: Decision) -> None:
        mode, reason = decision.mode.name.lower(), str(decision.reason)
        fields = {"tenant": cell.tenant, "model": cell.target, "mode": mode, "reason": reason}
        self._events.emit(EventKind.SPECULATION_CHANGED, fields)
        log.info("speculation of %s at %s is %s: %s", cell.tenant, cell.target, mode, reason)

    def _messages(self, decisions: Mapping[Cell, Decision]) -> dict[Cell, policy.TenantDecision]:
        known = self._planner.beliefs.of_cell
        return {cell: decision_to_proto(cell, decision, known(cell)) for cell, decision in decisions.items()}

    async def _save(self) -> None:
        saving, self._unsaved = self._unsaved, set()
        decided = self._messages(self._planner.decisions_of(saving))
        if not await self._plans.save(self.epoch, decided.values()):
            self._unsaved |= saving
