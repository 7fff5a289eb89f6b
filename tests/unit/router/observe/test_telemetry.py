"""What a router's metrics may cost."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_controller.router.observe.telemetry import RouterTelemetry
from prometheus_client import CollectorRegistry

from tests.unit.router.made_requests import a_request


class NoEvents:
    async def emit(self, kind: str, fields: Mapping[str, str | int | float | bool]) -> None: ...


def test_no_counter_grows_with_the_number_of_tenants() -> None:
    registry = CollectorRegistry()
    telemetry = RouterTelemetry(registry, NoEvents())
    for number in range(300):
        telemetry.low_acceptance("d", a_request(tenant=f"t{number}"), 0.1)
    samples = [one for family in registry.collect() for one in family.samples]
    assert len([one for one in samples if one.name == "outrider_low_acceptance_total"]) == 101
    assert registry.get_sample_value("outrider_low_acceptance_total", {"tenant": "other"}) == 200
