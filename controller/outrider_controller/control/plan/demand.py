"""Metrics of the plan: how many draft workers and routers the load needs, and how each tenant speculates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from outrider.telemetry.metrics import LabelCap
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider_controller.autoscaler.estimator import STATE
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Decision, Mode
from outrider_controller.autoscaler.planner import ANYBODY, Planner
from outrider_controller.autoscaler.sizing import Sizing, Utilisation, sizing

EVERY_S = 60.0


class Demand:
    """The leading control plane measures at each tick and sizes once a minute; the others report nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafts = Gauge(
            "outrider_draft_workers_wanted", "Draft workers that the load needs.", ["draft"], registry=registry
        )
        self._utilization = Gauge(
            "outrider_draft_pool_utilization",
            "Share of their time in which draft workers drafted, over the last minute, 0 to 1.",
            ["draft"],
            registry=registry,
        )
        self._routers = Gauge(
            "outrider_routers_wanted",
            "Routers that the load needs; 0 where another control plane leads.",
            registry=registry,
        )
        self._used: dict[str, Evidence] = {}
        """By draft version, since the last sizing."""
        self._busy: list[float] = []
        """Mean load of all routers, at each tick since then."""
        self._sizing = Sizing()
        self._looked_s: float | None = None
        self.num_routers = 0
        """Routers that the load needs; 0 while another control plane leads, or before the first sizing."""

    def learn(self, evidence: Mapping[EvidenceKey, Evidence]) -> None:
        for key, news in evidence.items():
            self._used.setdefault(key.draft, Evidence()).merge(news)

    def look(self, workers: Mapping[str, int], routers: Sequence[float], now_s: float) -> None:
        """`workers`: live ones by draft version. `routers`: each one's share of a core since its last report."""
        if self._looked_s is None or now_s < self._looked_s or not routers:
            self._begin(now_s)
            return
        self._busy.append(sum(routers) / len(routers))
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S:
            return
        seen = {version: self._utilisation(version, count, passed_s) for version, count in workers.items()}
        busy = Utilisation(len(routers), sum(self._busy) / len(self._busy))
        self._sizing = sizing(seen, busy, self._sizing, now_s)
        self._begin(now_s)
        self._utilization.clear()
        for version, one in seen.items():
            self._utilization.labels(version).set(min(1.0, one.busy))
        self._drafts.clear()
        for version, wanted in self._sizing.drafts.items():
            self._drafts.labels(version).set(wanted.workers)
        self.num_routers = self._sizing.routers.workers
        self._routers.set(self.num_routers)

    def _begin(self, now_s: float) -> None:
        self._looked_s, self._used, self._busy = now_s, {}, []

    def stop(self) -> None:
        """Another control plane leads."""
        self._looked_s = None
        self._utilization.clear()
        self._drafts.clear()
        self.num_routers = 0
        self._routers.set(0)

    def _utilisation(self, version: str, workers: int, passed_s: float) -> Utilisation:
        # Only the time of accepted tokens counts.
        used = self._used.get(version, Evidence())
        return Utilisation(workers, used.draft_us / 1e6 / passed_s / max(workers, 1), used.starved)


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
        enabled = _gauge("enabled", "1 if a tenant's requests speculate; 0 if none do, or only a few as a trial.")
        saving = _gauge(
            "saving",
            "Expected tokens of a round with a draft beyond those of its time without it.",
        )
        price = _gauge("price", "Probability from which a drafted token is worth its row in a step.")
        acceptance = _gauge("acceptance", "Share of a tenant's verified draft tokens that were accepted recently.")
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
    known = dict(zip(STATE, planner.estimator.of(EvidenceKey(*cell, decision.draft)), strict=True))
    return known["accepted"] / known["verified"] if known["verified"] else None
