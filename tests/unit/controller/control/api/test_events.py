"""Watching events: the last ones that fit, and those that come."""

from __future__ import annotations

from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.metadata import Event
from outrider.rpc.v1 import control_pb2 as control
from outrider_controller.control.api.events import EventFeed


class Log:
    """A stream of which `arriving` come one at a time, each after a look that found nothing."""

    def __init__(self, *kinds: str, arriving: tuple[str, ...] = ()) -> None:
        self.kept = [event(number, kind) for number, kind in enumerate(kinds, 1)]
        self.arriving = list(arriving)

    async def last_events(self, limit: int) -> list[Event]:
        return self.kept[-limit:]

    async def events(self, since: str | None = None, *, limit: int = 1000) -> list[Event]:
        found = [each for each in self.kept if since is None or number(each.id) > number(since)]
        if not found and self.arriving:
            self.kept.append(event(len(self.kept) + 1, self.arriving.pop(0)))
        return found[:limit]


def event(at: int, kind: str) -> Event:
    return Event(f"{1000 + at}-0", kind, {"worker_id": "odd" if at % 2 else "even", "tenant": "acme"})


def number(event_id: str) -> int:
    return int(event_id.partition("-")[0])


async def watched(log: Log, stop_after: int = 100, **request: Any) -> list[str]:
    feed, found = EventFeed(log, poll_s=0), []
    async for response in feed.WatchEvents(control.WatchEventsRequest(**request), None):
        found += [f"{each.kind} {each.unix_ms}" for each in response.events]
        if len(found) >= stop_after:
            break
    return found


async def test_the_last_events_that_fit_come_first_and_then_the_stream_ends() -> None:
    log = Log("a", "b", "a", "b", "a")
    assert await watched(log, last=2) == ["b 1004", "a 1005"]
    assert await watched(log, last=2, kinds=["b"]) == ["b 1002", "b 1004"]
    assert await watched(log, last=9, worker_id="even", tenant="acme") == ["b 1002", "b 1004"]
    assert await watched(log, last=9, tenant="nobody") == []
    assert await watched(log) == []


async def test_who_follows_hears_what_comes_and_who_comes_back_goes_on_where_he_was() -> None:
    assert await watched(Log("a", arriving=("b", "c")), stop_after=3, last=1, follow=True) == [
        "a 1001",
        "b 1002",
        "c 1003",
    ]
    assert await watched(Log(arriving=("b",)), stop_after=1, follow=True) == ["b 1001"]
    assert await watched(Log("a", "b", "c"), since="1001-0") == ["b 1002", "c 1003"]


@pytest.mark.parametrize(("field", "value"), [("last", 10_001), ("since", "yesterday")])
async def test_what_makes_no_sense_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await watched(Log(), **{field: value})
    assert refused.value.field == field
