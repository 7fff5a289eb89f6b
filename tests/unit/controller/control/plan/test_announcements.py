"""What operators are told of the plan."""

from __future__ import annotations

from typing import Any, cast

import pytest
from outrider.metadata.event_writer import EventWriter
from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import Decision, Mode, Plan, Reason
from outrider_controller.control.plan.leading import Announcements

CELL = Cell("acme", "m")


@pytest.mark.parametrize("reason", Reason)
def test_an_event_of_a_changed_mode_says_why_in_words(reason: Reason) -> None:
    told: list[dict[str, Any]] = []

    class Events:
        def emit(self, kind: str, fields: dict[str, Any]) -> None:
            told.append(fields)

    before = Plan.resumed({CELL: Decision(Mode.ON, Reason.SAVES)}, 0.0)
    announcements = Announcements("w", cast(EventWriter, Events()))
    announcements.decided({CELL: Decision(Mode.OFF, reason)}, before)
    (fields,) = told
    assert (fields["tenant"], fields["mode"]) == ("acme", "off")
    assert " " in fields["reason"] and reason not in fields["reason"].split()[0]
