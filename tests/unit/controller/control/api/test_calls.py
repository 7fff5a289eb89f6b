"""The parts of ControlService answer all of its calls."""

from __future__ import annotations

import pytest
from outrider.rpc.v1 import control_pb2
from outrider_controller.control.api.events import EventFeed
from outrider_controller.control.api.history import Histories
from outrider_controller.control.api.releases import Releases
from outrider_controller.control.api.routers import Routers
from outrider_controller.control.api.speculation import SpeculationCalls
from outrider_controller.control.api.tenants import Tenancy
from outrider_controller.control.api.usage import Bills
from outrider_controller.control.api.workers import Workers
from outrider_controller.control.server import ControlServicer

PARTS = (Workers, Routers, Tenancy, Histories, SpeculationCalls, Releases, Bills, EventFeed)
CALLS = [method.name for method in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods]


@pytest.mark.parametrize("call", CALLS)
def test_each_call_is_answered_by_one_part(call: str) -> None:
    [part] = [part for part in PARTS if hasattr(part, call)]
    assert getattr(ControlServicer(*PARTS), call) is getattr(part, call)


def test_what_no_part_answers_is_named() -> None:
    with pytest.raises(AttributeError, match="Unheard"):
        _ = ControlServicer(*PARTS).Unheard
