"""The plan of the whole cluster, made by the leading control plane and sent to all routers.

Evidence and modes are kept in the metadata store, so that the next leader continues from them. A leader that cannot
reach the store keeps leading while its routers cannot reach it either: no other could take over. If its routers can
reach the store, the leader alone is cut off and steps down, because another one may lead by now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NoReturn

from outrider.errors import Unavailable
from outrider.metadata import MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.metadata.leader import LEADER_GONE_S
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import Backoff, keep_running

from outrider_controller.autoscaler.evidence import Cell, model_of
from outrider_controller.autoscaler.plan import PLAN_EVERY_S, Decision, Plan, Reason, TargetState
from outrider_controller.autoscaler.planner import ANYBODY, Planner
from outrider_controller.control.alerts.active import Alerts
from outrider_controller.control.alerts.report import tell
from outrider_controller.control.plan.demand import Demand
from outrider_controller.control.plan.draft_versions import DraftVersions
from outrider_controller.control.plan.followers import Follower, Followers, not_leading
from outrider_controller.control.plan.kept_plan import KeptPlan, messages
from outrider_controller.control.plan.policies import TenantPolicies
from outrider_controller.control.plan.rollouts import RolloutLeader
from outrider_controller.plan_messages import (
    draft_version,
    evidence_from_proto,
    reported_states,
)

# Most changes of mode in one plan that get an event and a log line each.
_MAX_ANNOUNCED = 8
# To these modes and from them an operator changes, and nothing flaps.
_OPERATOR = frozenset({Reason.OPERATOR_ON, Reason.OPERATOR_OFF})


class Announcements:
    def __init__(self, worker_id: str, events: EventWriter) -> None:
        self.alerts = Alerts()
        self._worker_id = worker_id
        self._events = events

    def leads(self, epoch: int, num_decisions: int) -> None:
        self._events.emit(EventKind.LEADER_CHANGED, {"worker_id": self._worker_id, "epoch": epoch})
        log.info("leads, epoch %d: %d decisions go on", epoch, num_decisions)

    def step(self, states: Mapping[str, TargetState], now_s: float) -> None:
        tell(self.alerts.step({model: state.price for model, state in states.items()}, now_s), self._events)

    def decided(self, changed: Mapping[Cell, Decision], before: Plan) -> None:
        """Announces the changes of mode among these decisions."""
        num_announced = 0
        for cell, decision in changed.items():
            known = before.index.get(cell)
            if known is None or before.mode[known] == decision.mode or not cell.tenant:
                continue
            if not {decision.reason, before.reason_of(known)} & _OPERATOR:
                self.alerts.mode_changed(cell)
            if num_announced < _MAX_ANNOUNCED:
                num_announced += 1
                self._announce(cell, decision)

    def end(self) -> None:
        """Clears all alerts: the next leader raises its own."""
        tell(self.alerts.end("the control plane that raised it leads no more"), self._events)
        self.alerts = Alerts()

    def _announce(self, cell: Cell, decision: Decision) -> None:
        mode, reason = decision.mode.name.lower(), decision.reason.in_words
        fields = {"tenant": cell.tenant, "model": cell.target, "mode": mode, "reason": reason}
        self._events.emit(EventKind.SPECULATION_CHANGED, fields)
        log.info("speculation of %s at %s is %s: %s", cell.tenant, cell.target, mode, reason)


log = logging.getLogger(__name__)

_TICK_S = 0.5
# For so long routers may still send what a deleted tenant's requests have shown: they learn of it with the plan.
_DELETED_S = 5 * PLAN_EVERY_S
_MAX_CORES = 1024.0


class PlanLeader:
    """One control plane, which leads or stands by."""

    def __init__(
        self,
        worker_id: str,
        store: MetadataStore,
        events: EventWriter,
        demand: Demand,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.epoch = 0
        """0 while another leads."""
        self.followers = Followers()
        self.announcements = Announcements(worker_id, events)
        self._demand = demand
        self._store = store
        self._clock = clock
        self._lease = store.plans.lease(worker_id)
        self._planner = Planner()
        self._policies = TenantPolicies(store.plans, store.tenants)
        self._kept = KeptPlan(store.plans, store)
        self._versions = DraftVersions(store.drafts, clock)
        self._rollouts = RolloutLeader(store.drafts, events, clock)
        self._planned_s = float("-inf")
        self._deleted_s: dict[str, float] = {}
        """When each tenant was dropped, for `_DELETED_S`."""

    async def run(self) -> NoReturn:
        async def tick_and_sleep() -> None:
            await self.tick()
            changed = await self._store.plans.changed(_TICK_S)
            if changed:
                # By an operator, here or at another control plane: all settings are read and planned with at once.
                self._policies.outdated()
                self._planned_s = float("-inf")
            elif changed is None:
                await asyncio.sleep(_TICK_S)

        def failed(error: Exception) -> None:
            # That the store is away is logged by its connection, once.
            if not isinstance(error, Unavailable):
                log.error("planning failed", exc_info=error)

        try:
            await keep_running(tick_and_sleep, Backoff(_TICK_S, _TICK_S), failed)
        finally:
            if self.epoch:
                self.announcements.end()
                await self._kept.save(self._planner, self.epoch)
                await self._lease.resign()
                # Routers would wait until the server ends before they look for whoever leads next.
                self.epoch = 0
                self.followers.end()

    @property
    def planner(self) -> Planner | None:
        """None while another leads."""
        return self._planner if self.epoch else None

    # -- routers

    def follow(self, seen_epoch: int = 0) -> Follower:
        """A new follower, to which every decision is sent first. Raises Unavailable where another leads.

        `seen_epoch`: the highest that the router has received. After the store has lost its data it may be above this
        leader's, and the router would refuse the decisions: a higher epoch is taken before the router may follow.
        """
        if self.epoch < seen_epoch:
            self._lease.saw(seen_epoch)
            raise not_leading()
        if not self.epoch:
            raise not_leading()
        follower = Follower()
        follower.send(messages(self._planner, self._planner.decisions()))
        self.followers.add(follower)
        return follower

    def received(self, follower: Follower, message: policy.FollowRequest) -> None:
        known = [each for each in message.evidence if each.tenant not in self._deleted_s]
        evidence = dict(one for each in known if (one := evidence_from_proto(each)) is not None)
        self._planner.learn(evidence)
        # Own drafts need no workers, and a client's prediction may be right throughout.
        of_drafts = {key: one for key, one in evidence.items() if not model_of(key.target)[1]}
        self.announcements.alerts.learn(of_drafts)
        self._demand.learn(of_drafts)
        self._versions.learn(of_drafts)
        self._rollouts.learn(of_drafts, self._in_use)
        self._kept.unsaved.update(key.cell for key in evidence)
        follower.states = reported_states(message)
        follower.busy, follower.reaches_store = min(max(0.0, message.busy), _MAX_CORES), message.reaches_store

    def _in_use(self, cell: Cell) -> str:
        decision = self._planner.decisions_of([cell]).get(cell)
        return "" if decision is None else decision.draft

    # -- operators

    async def explain(self, tenant: str) -> tuple[list[policy.TenantDecision], bool]:
        """The tenant's decisions by target, and whether it has evidence. While another leads: as that one saved them.

        Raises Unavailable when they cannot be read.
        """
        own = await self._decided(tenant)
        found = own or await self._decided(ANYBODY)
        return sorted(found, key=lambda one: one.target), any(one.rounds for one in own)

    async def _decided(self, tenant: str) -> list[policy.TenantDecision]:
        if not self.epoch:
            return await self._kept.find(tenant)
        return list(messages(self._planner, self._planner.decisions(tenant)).values())

    # -- time

    async def tick(self) -> None:
        """Keeps leading, takes over, or stands by; plans when a plan is due."""
        await self._store.tenants.keep_required()
        epoch = await self._lease.hold()
        if self.epoch and (epoch == 0 or (epoch is None and self._cut_off)):
            self._step_down("another control plane leads" if epoch == 0 else "cut off from the metadata store")
        elif epoch and epoch != self.epoch:
            await self._take_over(epoch)
        if self.epoch:
            now_s = self._clock()
            changed = await self._policies.read(now_s, self.epoch) | await self._rollouts.read(self.epoch)
            # Here and below: what seems to come later is from before somebody set the clock back.
            if changed or not 0 <= now_s - self._planned_s < PLAN_EVERY_S:
                self._planned_s = now_s
                self._deleted_s = {
                    name: at_s for name, at_s in self._deleted_s.items() if 0 <= now_s - at_s < _DELETED_S
                }
                if self._policies.deleted:
                    await self._forget(self._policies.deleted, now_s)
                self._plan(now_s)
            drafts = await self._store.workers(worker.WORKER_ROLE_DRAFT)
            self._versions.see(drafts)
            live = Counter(draft_version(one.info) for one in drafts)
            self._demand.look(live, [one.busy for one in self.followers], now_s)
            if await self._kept.save_in_time(self._planner, self.epoch, now_s):
                await self._versions.save(self.epoch)
                await self._rollouts.save()
            with suppress(Unavailable):
                await self._rollouts.decide()

    async def _take_over(self, epoch: int) -> None:
        if not self.epoch:
            planner = Planner()
            if not await self._kept.resume(planner, self._clock()):
                return
            await self._versions.resume()
            await self._rollouts.resume()
            self._planner = planner
            self._policies.outdated()
            self._planned_s = float("-inf")
            self.announcements.leads(epoch, len(planner.plan.cells))
        else:
            # A new epoch for a present leader: the store lost its data.
            self._kept.unsaved.update(self._planner.plan.cells)
            await self._policies.restore()
            self._versions.lost()
            await self._rollouts.restore()
        self.epoch = epoch

    @property
    def _cut_off(self) -> bool:
        """The routers reach the store, this process does not. Their reports may be a second old."""
        return self._lease.unrenewed_s > LEADER_GONE_S and self.followers.reach_store

    def _step_down(self, why: str) -> None:
        log.warning("leads no more: %s", why)
        self.epoch = 0
        self.announcements.end()
        self._demand.stop()
        self.followers.end()

    async def _forget(self, tenants: Collection[str], now_s: float) -> None:
        """Drops deleted tenants: a new one of the same name begins without evidence."""
        self._deleted_s.update(dict.fromkeys(tenants, now_s))
        gone = self._planner.forget(tenants)
        self._kept.unsaved.difference_update(gone)
        self.followers.send(
            {cell: policy.TenantDecision(tenant=cell.tenant, target=cell.target, removed=True) for cell in gone}
        )
        await self._policies.forgotten()

    def _plan(self, now_s: float) -> None:
        states = self.followers.states()
        self.announcements.step(states, now_s)
        if not states:
            # No router has reported the fleet yet: a new leader keeps the old decisions.
            return
        before = self._planner.plan
        changed = self._planner.step(self._policies.by_tenant(), states, now_s, self._rollouts.stages)
        self._kept.unsaved.update(changed)
        self.followers.send(messages(self._planner, changed))
        self.announcements.decided(changed, before)
