"""The plan in the metadata store: a leader's decisions and evidence, so that the next leader continues from them and
other control planes can explain them.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.metadata import MetadataStore
from outrider.metadata.plans import PlanStore
from outrider.rpc.v1 import policy_pb2 as policy
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.evidence import Cell, own_drafts_of
from outrider_controller.autoscaler.plan import Decision
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.control.plan.followers import not_leading
from outrider_controller.control.plan.left_out import leaving_out
from outrider_controller.plan_messages import decision_from_proto, decision_to_proto, sums_from_proto

_SAVE_EVERY_S = 2.0


class KeptPlan:
    """Saves only the cells that differ from the store's."""

    def __init__(self, plans: PlanStore, leases: MetadataStore) -> None:
        self.unsaved: set[Cell] = set()
        self._plans = plans
        self._leases = leases
        self._saved_s = float("-inf")

    async def resume(self, planner: Planner, now_s: float) -> bool:
        """Lets the planner continue from the saved plan. False while the store is away."""
        kept = await self._plans.load()
        if kept is None:
            return False
        sums = [known for one in kept for known in sums_from_proto(one)]
        planner.resume(dict(decision_from_proto(one) for one in kept), sums, now_s)
        return True

    async def find(self, tenant: str) -> list[policy.TenantDecision]:
        """The tenant's decisions at the live targets. Raises Unavailable while the store is away."""
        workers = await self._leases.workers()
        targets = {one.info.model for one in workers if one.info.role == worker.WORKER_ROLE_TARGET}
        kept = await self._plans.find(tenant, targets | set(map(own_drafts_of, targets)))
        if kept is None:
            raise not_leading()
        return kept

    async def save_in_time(self, planner: Planner, epoch: int, now_s: float) -> bool:
        """Whether it was time."""
        due = not 0 <= now_s - self._saved_s < _SAVE_EVERY_S
        if due:
            self._saved_s = now_s
            await self.save(planner, epoch)
        return due

    async def save(self, planner: Planner, epoch: int) -> None:
        saving, self.unsaved = self.unsaved, set()
        if not await self._plans.save(epoch, messages(planner, planner.decisions_of(saving)).values()):
            self.unsaved |= saving


def messages(planner: Planner, decisions: Mapping[Cell, Decision]) -> dict[Cell, policy.TenantDecision]:
    """The decisions as messages, with the evidence about each cell's drafts."""
    known = planner.estimator.of_cell
    found = {}
    for cell, decision in decisions.items():
        with leaving_out(f"tenant {cell.tenant} at {cell.target}"):
            found[cell] = decision_to_proto(cell, decision, known(cell))
    return found
