"""Metrics of the plan for each tenant, for dashboards. Only the leading control plane shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.telemetry.metrics import LabelCap
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider_controller.autoscaler.belief import STATE
from outrider_controller.autoscaler.evidence import Cell, Pairing
from outrider_controller.autoscaler.plan import Decision, Mode
from outrider_controller.autoscaler.planner import ANYBODY, Planner

MAX_TENANTS = 100
_LABELS = ["tenant", "model_name"]


class TenantMetrics(Collector):
    """Read from the plan at each scrape, in the ops port's own thread: a plan does not change once it is made."""

    def __init__(self, registry: CollectorRegistry, planner: Callable[[], Planner | None]) -> None:
        """`planner` gives None while another control plane leads."""
        self._planner = planner
        self._tenants = LabelCap(MAX_TENANTS)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        enabled = _gauge("enabled", "1 where a tenant's requests speculate; 0 where none do, or a few try.")
        saving = _gauge("saving", "Believed saving of a round with a draft, in plain rounds.")
        price = _gauge("price", "How likely a drafted token has to be for its row to be worth its time.")
        acceptance = _gauge("acceptance", "Share of a tenant's verified draft tokens that were accepted of late.")
        planner = self._planner()
        for cell, decision in self._shown(planner) if planner is not None else ():
            labels = [cell.tenant, cell.target]
            enabled.add_metric(labels, float(decision.mode is Mode.ON))
            saving.add_metric(labels, decision.saving)
            price.add_metric(labels, decision.price)
            if planner is not None and (accepted := _acceptance(planner, cell, decision)) is not None:
                acceptance.add_metric(labels, accepted)
        yield from (enabled, saving, price, acceptance)

    def _shown(self, planner: Planner) -> Iterator[tuple[Cell, Decision]]:
        """The decisions of the tenants that came first. A sum over the others would have no meaning."""
        cells = [one for one in planner.plan.cells if one.tenant != ANYBODY and self._tenants(one.tenant) == one.tenant]
        return iter(planner.decisions_of(cells).items())


def _gauge(name: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider_speculation_{name}", meaning, labels=_LABELS)


def _acceptance(planner: Planner, cell: Cell, decision: Decision) -> float | None:
    """None when no token was verified."""
    known = dict(zip(STATE, planner.beliefs.of(Pairing(*cell, decision.draft)), strict=True))
    return known["accepted"] / known["verified"] if known["verified"] else None
