"""Repeats the plan: evidence goes in, changed decisions come out. Pure: no I/O, no clock.

The control plane has one for the whole cluster; each router has one for the time without a control plane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from outrider_controller.autoscaler.estimator import SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Decision, Fleet, Plan, TenantPolicy, plan
from outrider_controller.autoscaler.rollout import Rollouts

ANYBODY = ""
"""Tenant of the decision for tenants that have none yet: made from the mean of all tenants at the target."""

_NO_ROLLOUTS: Rollouts = {}
DecayedSums = tuple[EvidenceKey, Sequence[float]]
"""A key and its sums, in the order of `estimator.STATE`."""


class Planner:
    def __init__(self) -> None:
        self.estimator = SavingEstimator()
        self.plan = Plan()
        self._resumed: Mapping[Cell, Decision] = {}
        self._planned_for: tuple[object, ...] = ()

    def resume(self, decisions: Mapping[Cell, Decision], sums: Iterable[DecayedSums], now_s: float) -> None:
        """Continues from another process's decisions and sums."""
        self.estimator.restore(sums)
        self.plan, self._resumed = Plan.resumed(decisions, now_s), decisions

    def learn(self, evidence: Mapping[EvidenceKey, Evidence]) -> None:
        self.estimator.learn(evidence)

    def forget(self, tenants: Collection[str]) -> list[Cell]:
        """Drops the tenants' evidence and decisions. Returns the cells that have no decision any more."""
        gone = [cell for cell in self.plan.cells if cell.tenant in tenants]
        self._resumed = {cell: one for cell, one in self.decisions().items() if cell.tenant not in tenants}
        self.estimator, self._planned_for = self.estimator.without(tenants), ()
        # Where a tenant is back at once, its decision has changed, whatever it was before.
        self.plan = replace(Plan.resumed(self._resumed, self.plan.now_s), load=self.plan.load)
        return gone

    def step(
        self, tenants: Mapping[str, TenantPolicy], fleet: Fleet, now_s: float, rollouts: Rollouts = _NO_ROLLOUTS
    ) -> dict[Cell, Decision]:
        """Makes the next plan and returns the changed decisions. `tenants`: those with a policy of operators."""
        self._expect(tenants, fleet)
        last, self.plan = self.plan, plan(self.estimator, tenants, fleet, self.plan, now_s, rollouts)
        return dict(self.plan.changed(last))

    def decisions(self, tenant: str | None = None) -> dict[Cell, Decision]:
        wanted = [cell for cell in self.plan.cells if tenant in (None, cell.tenant)]
        return self.decisions_of(wanted)

    def decisions_of(self, cells: Iterable[Cell]) -> dict[Cell, Decision]:
        find = self.plan.decision if self.plan.estimated else self._resumed.get
        return {cell: decision for cell in cells if (decision := find(cell)) is not None}

    def _expect(self, tenants: Mapping[str, TenantPolicy], fleet: Fleet) -> None:
        """Expects each known tenant with every draft of its targets, and each tenant with a policy at every target: of
        one without any draft nobody knows yet what its workers draft themselves."""
        drafts = tuple((target, state.drafts | state.candidates) for target, state in fleet.items())
        if self._planned_for == (now := (drafts, frozenset(tenants), len(self.estimator.cells))):
            return
        known: dict[str, set[str]] = {target: {ANYBODY, *tenants} for target in fleet}
        for cell in self.estimator.cells:
            known.setdefault(cell.target, set()).add(cell.tenant)
        self.estimator.expect(
            EvidenceKey(tenant, target, draft)
            for target, versions in drafts
            for draft in sorted(versions) or [""]
            for tenant in sorted(known[target] if versions else tenants)
        )
        self._planned_for = (*now[:2], len(self.estimator.cells))
