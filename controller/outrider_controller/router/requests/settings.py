"""Sends new settings for running requests to the targets, after their rounds and after changes of the plan.

`speculation` decides within one request, and `policy` bounds what it may decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import NoReturn

from outrider.protocol.pairs import compatibility_problem
from outrider.protocol.rounds import Round
from outrider.runtime.supervision import Backoff, keep_running

from outrider_controller.autoscaler.evidence import Cell, own_drafts_of
from outrider_controller.autoscaler.plan import PLAN_EVERY_S, TargetState
from outrider_controller.plan_messages import draft_version
from outrider_controller.router import tuning
from outrider_controller.router.fleet.fleet import Fleet
from outrider_controller.router.fleet.loads import MAX_REPORT_AGE_S
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import now_us
from outrider_controller.router.requests.sequences import ActiveRequest, OpenDraft, SequenceTable
from outrider_controller.router.speculation.policy import Policy

log = logging.getLogger(__name__)


class SettingsSender:
    """The settings of all requests of one router."""

    def __init__(self, policy: Policy, fleet: Fleet, table: SequenceTable, telemetry: RouterTelemetry) -> None:
        self.policy = policy
        self._fleet = fleet
        self._table = table
        self._telemetry = telemetry

    def after_step(
        self, counted: Sequence[tuple[ActiveRequest, OpenDraft | None, Round]], price: float, at_us: int
    ) -> None:
        """Decides from the rounds of one step, each with the draft that it had, if any. `price`: of a drafted row."""
        self._telemetry.rounds([done for _, _, done in counted])
        turns = -(-len(counted) // tuning.DECISIONS_PER_STEP)
        for active, draft, done in counted:
            # In the last round an accepted token may have come in the place of the target's own.
            if done.num_drafted and not done.finish_reason:
                self.policy.own_drafts(active.request, done, price)
            if draft is None and active.lacks_draft:
                self.policy.missed(active.request, active.speculation.allowed.draft)
            if draft is None or active.draft is not draft:
                continue
            speculation = active.speculation
            decides = turns == 1 or (active.failover.rounds_here + draft.sequence_id) % turns == 0
            was_low = speculation.window.low
            setting = speculation.committed(done, at_us, price, decides=decides)
            if speculation.window.low and not was_low:
                self._telemetry.low_acceptance(draft.worker.worker_id, active.request, speculation.window.acceptance)
            if setting is not None:
                self._table.set_speculation(active, setting)

    def plan_changed(self, cells: Collection[Cell]) -> None:
        """Applies new decisions to running requests too."""
        for active in list(self._table.requests) if cells else ():
            request = active.request
            targets = request.model, own_drafts_of(request.model)
            if any(self.policy.decides(cells, request.tenant, target) for target in targets):
                allowed = self.policy.allowance(request)
                self._take_back(active, allowed.draft)
                setting = active.speculation.allow(allowed)
                if setting is not None:
                    self._table.set_speculation(active, setting)
                if active.lacks_draft:
                    active.events.wake()

    def _take_back(self, active: ActiveRequest, draft: str | None) -> None:
        """The request leaves a candidate that its rollout gives it no more."""
        if active.draft is None or not (info := active.draft.worker.info).candidate or draft_version(info) == draft:
            return
        self._table.release_draft(active, "rollout")

    def target_states(self) -> dict[str, TargetState]:
        """What a plan needs to know of the fleet, by model."""
        fleet, now_s, states = self._fleet, now_us() / 1e6, {}
        drafts = [d for d in fleet.drafts.values() if d.leased and fleet.loads.takes_work(d)]
        for target in (*fleet.targets.values(), *fleet.attached.values()):
            model = target.info.model
            if not target.up or model in states:
                continue
            attached = [t for t in fleet.attached.values() if t.info.model == model]
            prices = [t.price for t in (*fleet.live_targets(model), *attached)]
            known = [price for price in prices if now_s - price.at_s < MAX_REPORT_AGE_S and price.best_chance]
            fitting = [d.info for d in drafts if compatibility_problem(target.info, d.info) is None]
            states[model] = TargetState(
                frozenset(draft_version(info) for info in fitting if not info.candidate),
                price=min((price.row for price in known), default=0.0),
                best_chance=max((price.best_chance for price in known), default=1.0),
                candidates=frozenset(draft_version(info) for info in fitting if info.candidate),
            )
            if sources := self.policy.own_sources.get(model):
                # What a row costs is a part of their evidence.
                states[own_drafts_of(model)] = TargetState(frozenset(sources))
        return states

    async def keep_planning(self) -> NoReturn:
        """Plans while no control plane does."""

        async def replan_and_sleep() -> None:
            self.plan_changed(self.policy.replan(self.target_states(), asyncio.get_running_loop().time()))
            await asyncio.sleep(PLAN_EVERY_S)

        def failed(error: Exception) -> None:
            log.error("planning failed", exc_info=error)

        # After an error the last plan stays in force.
        await keep_running(replan_and_sleep, Backoff(PLAN_EVERY_S, PLAN_EVERY_S), failed)
