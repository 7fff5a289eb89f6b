"""The events stream for operators: the last matching events, and new ones as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from outrider.errors import InvalidRequest, Overloaded
from outrider.metadata import Event, MetadataStore
from outrider.metadata.events import MAX_EVENTS, check_event_id
from outrider.rpc.v1 import control_pb2 as control

MAX_WATCHERS = 256
_POLL_S = 0.5
_AT_ONCE = 1000
# The stream id before every entry.
_BEGINNING = "0-0"


class EventFeed:
    """Answers WatchEvents."""

    def __init__(self, log: MetadataStore, poll_s: float = _POLL_S) -> None:
        self._log = log
        self._poll_s = poll_s
        self._num_watchers = 0

    async def WatchEvents(
        self, request: control.WatchEventsRequest, _: object
    ) -> AsyncIterator[control.WatchEventsResponse]:
        """Raises InvalidRequest, and Overloaded where too many watch."""
        _check(request)
        since = request.since
        if self._num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} watch events already", reason="TOO_MANY_WATCHERS")
        self._num_watchers += 1
        try:
            if not since:
                found = await self._log.last_events(MAX_EVENTS)
                since = found[-1].id if found else _BEGINNING
                fitting = [event for event in found if _fits(event, request)][-request.last :] if request.last else []
                # Even when there are none, so that the caller sees that the call was accepted.
                for start in range(0, max(1, len(fitting)), _AT_ONCE):
                    yield _response(fitting[start : start + _AT_ONCE])
            async for events in self._after(since, follow=request.follow):
                if fitting := [event for event in events if _fits(event, request)]:
                    yield _response(fitting)
        finally:
            self._num_watchers -= 1

    async def _after(self, since: str, *, follow: bool) -> AsyncIterator[list[Event]]:
        while True:
            events = await self._log.events(since, limit=_AT_ONCE)
            if events:
                since = events[-1].id
                yield events
            elif not follow:
                return
            else:
                await asyncio.sleep(self._poll_s)


def _fits(event: Event, request: control.WatchEventsRequest) -> bool:
    return (
        (not request.kinds or event.kind in request.kinds)
        and request.worker_id in ("", event.fields.get("worker_id"))
        and request.tenant in ("", event.fields.get("tenant"))
    )


def _check(request: control.WatchEventsRequest) -> None:
    if request.last > MAX_EVENTS:
        raise InvalidRequest("last", f"{request.last}; at most {MAX_EVENTS} are kept")
    if request.since:
        try:
            check_event_id(request.since)
        except ValueError as error:
            raise InvalidRequest("since", str(error).removeprefix("since: ")) from None


def _response(events: Sequence[Event]) -> control.WatchEventsResponse:
    messages = [
        control.Event(id=event.id, unix_ms=event.unix_ms, kind=event.kind, fields=event.fields) for event in events
    ]
    return control.WatchEventsResponse(events=messages)
