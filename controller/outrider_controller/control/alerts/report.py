"""Sends alerts to the log, the events stream and Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind
from outrider.telemetry.metrics import LabelCap
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider_controller.control.alerts.active import Alert, Change

log = logging.getLogger(__name__)

_MAX_TENANTS = 100


class AlertMetrics(Collector):
    """1 for every active alert; no sample for the others."""

    def __init__(self, registry: CollectorRegistry, active: Callable[[], Iterable[Alert]]) -> None:
        self._active = active
        self._tenants = LabelCap(_MAX_TENANTS)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels = ["alert", "tenant", "model_name"]
        family = GaugeMetricFamily(
            "outrider_alert_active", "Alerts that are raised now, as in `outrider events`.", labels=labels
        )
        for alert in {(one.kind.value, self._tenants(one.tenant), one.model) for one in tuple(self._active())}:
            family.add_metric(list(alert), 1)
        yield family


def tell(changes: Iterable[Change], events: EventWriter) -> None:
    """Never waits, and never raises."""
    for change in changes:
        alert = change.alert
        named = {"alert": alert.kind.value, "tenant": alert.tenant, "model": alert.model, "reason": change.reason}
        data = {name: value for name, value in named.items() if value}
        kind = EventKind.ALERT_RAISED if change.raised else EventKind.ALERT_CLEARED
        events.emit(kind, data)
        level = logging.WARNING if change.raised else logging.INFO
        end = "is up" if change.raised else "is over"
        of = {"tenant": alert.tenant} if alert.tenant else {}
        log.log(level, "%s %s: %s", alert.kind, end, change.reason, extra=of)
