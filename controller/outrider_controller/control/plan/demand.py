"""How many draft workers and routers the load needs, as metrics for an autoscaler of machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from outrider_controller.autoscaler.evidence import Evidence, Pairing
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

    def learn(self, evidence: Mapping[Pairing, Evidence]) -> None:
        for pairing, news in evidence.items():
            self._used.setdefault(pairing.draft, Evidence()).merge(news)

    def look(self, workers: Mapping[str, int], routers: Sequence[float], now_s: float) -> None:
        """`workers`: live ones by draft version. `routers`: each one's share of a core since its last report."""
        if self._looked_s is None or not routers:
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
        # Only verified work counts: a busy draft would not compute the rest, which is run-ahead.
        used = self._used.get(version, Evidence())
        return Utilisation(workers, used.draft_us / 1e6 / passed_s / max(workers, 1), used.starved)
