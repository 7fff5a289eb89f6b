"""Under which ids requests are open, whatever an attached server calls its own."""

from __future__ import annotations

from typing import Any

from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.speculation import PLAIN
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.requests.sequences import SequenceTable
from prometheus_client import CollectorRegistry

from tests.fakes import fake_info
from tests.unit.router.made_requests import a_request, under_way
from tests.unit.router.observe.test_telemetry import NoEvents
from tests.unit.router.speculation.test_settings import Link


async def test_an_attached_server_cannot_take_the_id_that_a_request_of_the_fleet_gets_next() -> None:
    """It can tell it from the ids of its own sequences at drafts."""
    table = SequenceTable(RouterTelemetry(CollectorRegistry(), NoEvents()), first_id=7)
    links: list[Any] = [Link(fake_info(worker.WORKER_ROLE_TARGET, attached=attached)) for attached in (True, False)]
    server, target = links
    its_own, of_the_fleet = under_way(a_request()), under_way(a_request())
    table.adopt(its_own, server, 7)
    table.open(of_the_fleet, target, None, PLAIN)
    [sequence_id] = target.open_sequences
    table.drop_target(its_own, None)
    assert table.at_target(target, sequence_id) is of_the_fleet
