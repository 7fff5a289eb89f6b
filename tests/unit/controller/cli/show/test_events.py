"""outrider events -w goes on where it was when the control plane comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from outrider.rpc.v1 import control_pb2
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.show.events import Tail, event_line


class Control:
    """Answers each call with the next list of ids, and then fails with the code given."""

    def __init__(self, *answers: tuple[list[str], ExitCode | None]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.shown: list[str] = []
        self.tail = Tail(control_pb2.WatchEventsRequest(follow=True), lambda row: self.shown.append(row["id"]))

    def WatchEvents(self, request: Any, timeout: None) -> AsyncIterator[control_pb2.WatchEventsResponse]:
        self.asked.append(request.since)
        return self.said()

    async def said(self) -> AsyncIterator[control_pb2.WatchEventsResponse]:
        if not self.answers:
            raise KeyboardInterrupt
        ids, code = self.answers.pop(0)
        if ids or code is None:
            yield control_pb2.WatchEventsResponse(events=[control_pb2.Event(id=one, kind="k") for one in ids])
        if code is not None:
            raise CommandError("gone", code)

    def keep_reading(self) -> None:
        self.tail.keep_reading(lambda: asyncio.run(self.tail.read(self)), pause_s=0)  # type: ignore[arg-type]


def test_what_happened_while_the_control_plane_was_away_is_told_when_it_is_back() -> None:
    away = ExitCode.UNAVAILABLE
    control = Control((["1-0", "2-0"], away), ([], away), (["3-0"], None))
    with pytest.raises(KeyboardInterrupt):
        control.keep_reading()
    assert control.shown == ["1-0", "2-0", "3-0"]
    assert control.asked == ["", "2-0", "2-0", "3-0"]


@pytest.mark.parametrize("answers", [[([], ExitCode.UNAVAILABLE)], [(["1-0"], ExitCode.DENIED)]])
def test_nobody_there_and_a_refusal_end_it(answers: list[tuple[list[str], ExitCode | None]]) -> None:
    with pytest.raises(CommandError):
        Control(*answers).keep_reading()


def test_a_value_cannot_write_to_the_terminal() -> None:
    fields = {"reason": "a b\x1b[2J", "worker_id": "w1", "by": "local"}
    line = event_line({"time": "2026-01-01T00:00:00Z", "kind": "worker_cordoned", "fields": fields})
    assert line == r'2026-01-01T00:00:00Z  worker_cordoned       worker_id=w1 by=local reason="a b\u001b[2J"'
