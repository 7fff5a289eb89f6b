"""HTTP/1.1 connections with limits that uvicorn lacks: on the time without a request, and on their number.

Does not interpret requests. `reading` limits the bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11

# h11 reads requests, but exports no way to see the lines of a head or a trailer as they came.
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from outrider.gateway.config import GatewayLimits
from outrider.gateway.http.access import tenant_in
from outrider.gateway.http.errors import HttpError

MAX_HEAD_BYTES = 16_384
_CHUNK_BYTES = 65_536
_TURN_S = 0.01
_READ_BYTES = 10 * _CHUNK_BYTES
"""Of large requests in one turn, over all connections."""
_DROPPED = 8
"""So many times slower what follows an answer is read."""
_CROWDED = "too many requests arrive that do not end"


@dataclass(slots=True)
class Bounds:
    """State shared by all connections of one port."""

    limits: GatewayLimits
    max_connections: int
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Connections without a complete request, longest first."""
    unread: dict[Connection, int] = field(default_factory=dict)
    """Bytes of requests that have not arrived whole, those first that began first."""
    unread_bytes: int = 0
    reading: list[Connection] = field(default_factory=list)
    """Connections with large requests that are not read for the moment."""
    ahead_bytes: float = 0.0
    """Read of those before it was their time."""
    left: bool = False

    def leave(self) -> None:
        """Closes idle connections now, and others after their answer, even if that has begun already. Their clients
        connect again, to another gateway if there is one.
        """
        self.left = True
        for connection in [one for one in self.waiting if one.idle]:
            connection.transport.close()

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """`connection` has so many bytes of a request that has not arrived whole; 0: it has arrived."""
        self.unread_bytes += num_bytes - self.unread.get(connection, 0)
        if num_bytes:
            self.unread[connection] = num_bytes
        else:
            self.unread.pop(connection, None)
        if self.unread_bytes > self.limits.max_unread_http_bytes:
            self._give_up()

    def slow_down(self, connection: Connection, num_bytes: int) -> None:
        """`connection` has read so much of a large request. All of those together are read at a bounded rate, so that
        they do not keep the others waiting."""
        self.ahead_bytes += num_bytes
        if self.ahead_bytes > _READ_BYTES:
            connection.transport.pause_reading()
            self.reading.append(connection)
            if len(self.reading) == 1:
                connection.loop.call_later(_TURN_S, self._go_on, connection.loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ahead_bytes = max(0.0, self.ahead_bytes - _READ_BYTES)
        count = max(0, int(_READ_BYTES - self.ahead_bytes)) // _CHUNK_BYTES
        # The last ones first: they come to their end one after the other, and not all at the same late time.
        for _ in range(min(count, len(self.reading))):
            self.reading.pop().go_on()
        if self.reading:
            loop.call_later(_TURN_S, self._go_on, loop)

    def _give_up(self) -> None:
        """Gives up requests of the callers that have most, the oldest first, until an eighth of the room is free: whose
        requests arrive at once is not among them."""
        of_callers: dict[str, list[Connection]] = defaultdict(list)
        held: Counter[str] = Counter()
        for connection, num_bytes in self.unread.items():
            of_callers[connection.caller].append(connection)
            held[connection.caller] += num_bytes
        enough = self.limits.max_unread_http_bytes * 7 // 8
        while self.unread_bytes > enough:
            [(most, _)] = held.most_common(1)
            connection = of_callers[most].pop(0)
            held[most] -= self.unread[connection]
            self.hold(connection, 0)
            connection.give_up(HttpError(503, _CROWDED, "service_unavailable", headers={"Retry-After": "1"}))

    def protocol(self, **of_uvicorn: Any) -> Connection:
        return Connection(self, **of_uvicorn)


def closing(app: ASGIApp, leaving: asyncio.Event) -> ASGIApp:
    """Wraps `app` so that its answers close their connections once `leaving` is set."""

    async def closing_app(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and leaving.is_set():
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, closing_send)

    return closing_app


class Connection(H11Protocol):
    """A client has `header_timeout_s` for the head of its first request, `idle_timeout_s` more for each further head,
    and `send_timeout_s` to read what it is sent. Above the limit, the connection longest without a request is closed.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = strict = StrictConnection(MAX_HEAD_BYTES)
        self._lines = strict.unread
        self._bounds = bounds
        self._limits = bounds.limits
        self._waiting_timer: asyncio.TimerHandle | None = None
        self._sending_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            # Of asyncio: less at once, so that many connections with large requests do not take long.
            transport.max_size = _CHUNK_BYTES
        if len(self.connections) > self._bounds.max_connections and not self._make_room():
            message = "every connection that this gateway takes has a request under way"
            self._end(HttpError(503, message, "service_unavailable", headers={"Retry-After": "1"}))
            return
        self._wait_for_head(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._bounds.waiting.pop(self, None)
        self._bounds.hold(self, 0)
        _stop(self._waiting_timer)
        _stop(self._sending_timer)

    @property
    def caller(self) -> str:
        """The tenant of a request whose body is read."""
        return tenant_in(self.cycle.scope) if self._answering else ""

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().data_received(data)
        if self._more_follows:
            # What follows an answer is only dropped, which has time.
            self._bounds.slow_down(self, len(data) * (1 if self._answering else _DROPPED))

    @property
    def _more_follows(self) -> bool:
        """Whether a request that has begun has not arrived whole, also one that is answered already."""
        return self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing()

    def go_on(self) -> None:
        """Reads again, unless uvicorn waits for the application."""
        if not (self.transport.is_closing() or self.flow.read_paused):
            self.transport.resume_reading()

    def handle_events(self) -> None:
        super().handle_events()
        if not (self._answering and self.cycle.more_body):
            self._body_bytes = 0
        self._bounds.hold(self, self._body_bytes + len(self._lines))
        if self._answering:
            _stop(self._waiting_timer)
            if not self.cycle.more_body:
                self._bounds.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        # Before the call, because a pipelined request may begin in it. uvicorn closes at idle_timeout_s unless a byte
        # arrives. The timer set here continues, so that an endless head or unread body does not keep the connection.
        self._wait_for_head(self._limits.idle_timeout_s + self._limits.header_timeout_s)
        if self._bounds.left:
            # Closes after the rest is sent. A further request would only be refused.
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Handles bytes that are no HTTP, between requests or during one, which is then given up."""
        self.give_up(HttpError(400, msg))

    def give_up(self, error: HttpError) -> None:
        """Answers, unless an answer has begun, and closes the connection."""
        begun = self._answering and self.cycle.response_started
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.transport.abort()
        else:
            self._end(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending_timer = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._sending_timer)

    @property
    def idle(self) -> bool:
        """Whether the last answer is complete and no byte of a further request has arrived."""
        return self.cycle is not None and not self._answering and not self.conn.trailing_data[0]

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self, timeout_s: float) -> None:
        _stop(self._waiting_timer)
        self._waiting_timer = self.loop.call_later(timeout_s, self._head_too_late)
        self._bounds.waiting.pop(self, None)
        self._bounds.waiting[self] = None

    def _head_too_late(self) -> None:
        part_of_a_head = self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]
        if part_of_a_head and self.transport.get_write_buffer_size() == 0:
            self._end(HttpError(408, "the head of the request did not arrive in time"))
        else:
            self.transport.abort()

    def _make_room(self) -> bool:
        """Closes the connection longest without a request. False when all have one."""
        longest = next(iter(self._bounds.waiting), None)
        if longest is None:
            return False
        # Removed at once and not in connection_lost, because more connections may arrive before that.
        del self._bounds.waiting[longest]
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    def _end(self, error: HttpError) -> None:
        """Sends an answer outside any request, and closes the connection."""
        body = json.dumps(error.shared_body).encode()
        lines = {"connection": "close", "content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **error.headers}.items())
        self.transport.write(f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body)
        self.transport.close()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


_LENIENT_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]")
"""A line feed or a carriage return alone (RFC 9112, 2.2), and a folded field (5.2)."""


class StrictConnection(h11.Connection):
    """The server's side of one connection. `next_event` raises RemoteProtocolError also for lenient requests."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer = self.unread = _StrictLines()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check_length(event)
        return event


class _StrictLines(ReceiveBuffer):
    """Refuses heads and trailers with lines that only lenient servers read."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self)
        lines = super().maybe_extract_lines()
        if lines is not None and _LENIENT_LINE.search(before[: len(before) - len(self)]):
            raise h11.LocalProtocolError("a line that does not end in CR LF, or a folded one")
        return lines


def _check_length(request: h11.Request) -> None:
    """The body's length is given once (RFC 9112, 6.1)."""
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("transfer-encoding with content-length, or in HTTP/1.0")
