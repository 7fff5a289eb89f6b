"""Runs the plan from second to second: evidence goes in, decisions that changed come out. Pure: no I/O, no clock.

The control plane has one for the whole cluster; a router has one for the time in which it is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from outrider_controller.autoscaler.belief import Beliefs
from outrider_controller.autoscaler.evidence import Cell, Evidence, Pairing
from outrider_controller.autoscaler.plan import Decision, Fleet, Plan, TenantPolicy, plan

ANYBODY = ""
"""Tenant of the decision that holds for whoever has none yet: what is usual at the target decides it."""

Belief = tuple[Pairing, Sequence[float]]
"""What is known of one pairing: the values of `belief.STATE`."""


class Planner:
    def __init__(self) -> None:
        self.beliefs = Beliefs()
        self.plan = Plan()
        self._resumed: Mapping[Cell, Decision] = {}
        self._planned_for: tuple[object, ...] = ()

    def resume(self, decisions: Mapping[Cell, Decision], beliefs: Iterable[Belief], now_s: float) -> None:
        """Goes on from what another process decided and believed."""
        self.beliefs.restore(beliefs)
        self.plan, self._resumed = Plan.resumed(decisions, now_s), decisions

    def learn(self, evidence: Mapping[Pairing, Evidence]) -> None:
        self.beliefs.learn(evidence)

    def forget(self, tenants: Collection[str]) -> list[Cell]:
        """What was known of them, and decided. Returns the cells that have no decision any more."""
        gone = [cell for cell in self.plan.cells if cell.tenant in tenants]
        self.beliefs, self._planned_for = self.beliefs.without(tenants), ()
        self._resumed = {cell: one for cell, one in self._resumed.items() if cell.tenant not in tenants}
        return gone

    def step(self, tenants: Mapping[str, TenantPolicy], fleet: Fleet, now_s: float) -> dict[Cell, Decision]:
        """The decisions that are new or other than before. `tenants`: those for whom operators have set something."""
        self._expect(tenants, fleet)
        last, self.plan = self.plan, plan(self.beliefs, tenants, fleet, self.plan, now_s)
        return dict(self.plan.changed(last))

    def decisions(self, tenant: str | None = None) -> dict[Cell, Decision]:
        """Those in force, of one tenant or of all."""
        wanted = [cell for cell in self.plan.cells if tenant in (None, cell.tenant)]
        return self.decisions_of(wanted)

    def decisions_of(self, cells: Iterable[Cell]) -> dict[Cell, Decision]:
        """Those in force, of the cells that have one."""
        find = self.plan.decision if self.plan.estimated else self._resumed.get
        return {cell: decision for cell in cells if (decision := find(cell)) is not None}

    def _expect(self, tenants: Mapping[str, TenantPolicy], fleet: Fleet) -> None:
        """A known tenant may come to every draft of its targets; one with a policy, to every target."""
        drafts = tuple((target, state.drafts) for target, state in fleet.items())
        if self._planned_for == (now := (drafts, frozenset(tenants), len(self.beliefs.cells))):
            return
        known: dict[str, set[str]] = {target: {ANYBODY, *tenants} for target in fleet}
        for cell in self.beliefs.cells:
            known.setdefault(cell.target, set()).add(cell.tenant)
        self.beliefs.expect(
            Pairing(tenant, target, draft)
            for target, versions in drafts
            for draft in sorted(versions)
            for tenant in sorted(known[target])
        )
        self._planned_for = (*now[:2], len(self.beliefs.cells))
