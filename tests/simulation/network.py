"""A network in virtual time with gRPC's interfaces: generated stubs and servicers work on it unchanged.

Streams behave like gRPC's: ordered and reliable until they break. Then messages on their way are lost, and each end
notices after its own delay. The network makes delays, stalls, refused connections and dead peers; the `tamper` hook
makes the messages of hostile peers.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

_CONNECT_TIMEOUT_S = 20.0

Tamper = Callable[["Stream", bool, Any], list[Any]]
"""(stream, whether client to server, message) → the messages to send instead, in order."""
Observe = Callable[["Stream", bool, Any], None]


@dataclass(slots=True, eq=False)
class Host:
    """One process: its servers and its state."""

    name: str
    alive: bool = True
    silent_until_s: float = 0.0
    """Stopped or cut off until then: its messages, both ways, are delayed but not lost."""
    streams: list[Stream] = field(default_factory=list)
    """Open streams of which it is one end."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Its running handlers."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


@dataclass(slots=True)
class _Server:
    """Receives the handlers of the generated add_*Servicer_to_server functions."""

    host: Host
    methods: dict[str, Any] = field(default_factory=dict)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same handlers again, in another form."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = handler


class Network:
    """The listening servers by address, and the delays."""

    def __init__(self, rng: random.Random, delay_s: tuple[float, float]) -> None:
        self.tamper: Tamper = lambda stream, to_server, message: [message]
        self.observe: Observe = lambda stream, to_server, message: None
        self._rng = rng
        self._delay_s = delay_s
        self._servers: dict[str, _Server] = {}

    def listen(self, host: Host, address: str) -> Any:
        """A server for the generated add_*Servicer_to_server functions."""
        server = self._servers[address] = _Server(host)
        return server

    def server_at(self, address: str) -> _Server | None:
        """None where no process listens: connections are refused."""
        server = self._servers.get(address)
        return server if server is not None and server.host.alive else None

    def channel(self, client: Host, address: str) -> Channel:
        return Channel(self, client, address)

    def delay_s(self) -> float:
        low, high = self._delay_s
        # Mostly near the low end with a long tail, like real networks.
        return low + (high - low) * self._rng.random() ** 3

    def kill(self, host: Host) -> None:
        """Ends the process at once: its tasks stop, and its peers' streams break."""
        host.alive = False
        for stream in list(host.streams):
            stream.break_off("the peer is gone")
        for task in list(host.tasks):
            task.cancel()


class Channel:
    """The part of grpc.aio.Channel that stubs use."""

    def __init__(self, network: Network, client: Host, address: str) -> None:
        self.network = network
        self.client = client
        self.address = address
        self._streams: list[Stream] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        if grace:
            ended = [asyncio.ensure_future(stream.ended.wait()) for stream in self._streams]
            try:
                if ended:
                    await asyncio.wait(ended, timeout=grace)
            finally:
                # Also when the close itself is cancelled, because no other reference to them remains.
                for waiting in ended:
                    waiting.cancel()
        for stream in self._streams:
            stream.cancel()

    def stream_stream(self, path: str, *, response_deserializer: Any, **_: Any) -> Any:
        def call(**_: Any) -> Stream:
            stream = Stream(self, path, response_deserializer)
            self._streams.append(stream)
            return stream

        return call

    def unary_unary(self, path: str, **_: Any) -> Any:
        async def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            try:
                async with asyncio.timeout(timeout):
                    return await self._ask(path, request)
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None

        return call

    def unary_stream(self, path: str, **_: Any) -> Any:
        return _unsupported

    stream_unary = unary_stream

    async def _ask(self, path: str, request: Any) -> Any:
        server = await self._reached()
        reply = await server.methods[path].unary_unary(request, None)
        await self._travel(server.host)
        if not server.host.alive:
            raise _error(grpc.StatusCode.UNAVAILABLE, "the peer is gone")
        return reply

    async def _reached(self) -> _Server:
        server = self.network.server_at(self.address)
        await self._travel(None if server is None else server.host)
        server = self.network.server_at(self.address)
        if server is None:
            raise _error(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return server

    async def _travel(self, other: Host | None) -> None:
        """Waits for the delay to the other end, or until connecting is given up."""
        now_s = asyncio.get_running_loop().time()
        arrives_s = arrival_s(now_s + self.network.delay_s(), self.client, other)
        await asyncio.sleep(min(arrives_s - now_s, _CONNECT_TIMEOUT_S))
        if arrives_s - now_s > _CONNECT_TIMEOUT_S:
            raise _error(grpc.StatusCode.UNAVAILABLE, "connection timed out")


class _Pipe:
    """One direction of a stream: messages in order, then EOF or an error."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._arrived: deque[Any] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Any) -> None:
        self._arrived.append(item)
        self._filled.set()

    async def get(self) -> Any:
        """The next message. Raises an error that was put, and again on each later call."""
        while not self._arrived:
            self._filled.clear()
            await self._filled.wait()
        item = self._arrived[0]
        if isinstance(item, Exception):
            raise item
        if item is not grpc.aio.EOF:
            self._arrived.popleft()
        return item

    def fail(self, error: Exception) -> None:
        """Unread messages are lost."""
        self._arrived.clear()
        self.put(error)


class Stream:
    """Both ends of one bidirectional stream. The client's end is the object itself."""

    def __init__(self, channel: Channel, path: str, deserialize: Any) -> None:
        self.client = channel.client
        self.server: Host | None = None
        self.path = path
        self.broken = False
        self.ended = asyncio.Event()
        self.facts: dict[str, Any] = {}
        """State of the `observe` and `tamper` hooks."""
        self._network = channel.network
        self._loop = asyncio.get_running_loop()
        self._to_server, self._to_client = _Pipe(), _Pipe()
        self._decode: dict[bool, Any] = {False: deserialize}
        self._handler: asyncio.Task[Any] | None = None
        self.client.streams.append(self)
        self._early: deque[Any] = deque()
        """Messages written before the connection was open."""
        self._opening = self.client.spawn(self._open(channel))

    # -- the client's end

    async def read(self) -> Any:
        return await self._to_client.get()

    async def write(self, message: Any) -> None:
        if self.ended.is_set():
            raise asyncio.InvalidStateError("the call is over")
        self._send(True, message)

    def cancel(self) -> bool:
        """The client cancels the call."""
        if self.ended.is_set():
            return False
        self._to_client.fail(_error(grpc.StatusCode.CANCELLED, "hung up"))
        self._finish()
        self._later(True, self._drop_handler)
        return True

    def inject(self, message: Any) -> None:
        """Sends a message to the client as if it came from the server."""
        if not self.broken and not self.ended.is_set():
            self._forward(False, message)

    async def details(self) -> str:
        return "the handler returned"

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    # -- its life

    async def _open(self, channel: Channel) -> None:
        try:
            server = await channel._reached()
        except grpc.aio.AioRpcError as error:
            self._to_client.fail(error)
            self._finish()
            return
        if self.ended.is_set():
            return
        handler = server.methods[self.path]
        self.server = server.host
        self._decode[True] = handler.request_deserializer
        server.host.streams.append(self)
        self._handler = server.host.spawn(self._handle(handler))
        while self._early:
            self._forward(True, self._early.popleft())

    async def _handle(self, handler: Any) -> None:
        error: Exception | None = None
        try:
            await handler.stream_stream(_Requests(self._to_server), ServerEnd(self))
        except Exception as raised:
            error = _error(grpc.StatusCode.UNKNOWN, type(raised).__name__)
        if not self.broken and self.server is not None and self.server.alive:
            self._arrive(False, grpc.aio.EOF if error is None else error, closes=True)

    def break_off(self, why: str) -> None:
        """Breaks the connection: messages on their way are lost, and each end notices after its own delay."""
        if self.broken or self.ended.is_set():
            return
        self.broken = True
        self._later(False, lambda: self._client_learns(why))
        self._later(True, self._drop_handler)

    def _client_learns(self, why: str) -> None:
        self._to_client.fail(_error(grpc.StatusCode.UNAVAILABLE, why))
        self._finish()

    def _drop_handler(self) -> None:
        if self._handler is not None:
            self._handler.cancel()

    def _finish(self) -> None:
        self.ended.set()
        for host in (self.client, self.server):
            if host is not None and self in host.streams:
                host.streams.remove(self)

    # -- messages

    def _send(self, to_server: bool, message: Any) -> None:
        if self.broken:
            return
        for sent in self._network.tamper(self, to_server, message):
            self._forward(to_server, sent)

    def _forward(self, to_server: bool, message: Any) -> None:
        if to_server and self.server is None:
            self._early.append(message)
            return
        self._network.observe(self, to_server, message)
        # Through bytes, as on a wire: the ends must not share a message object.
        self._arrive(to_server, message.SerializeToString())

    def _arrive(self, to_server: bool, item: Any, *, closes: bool = False) -> None:
        pipe = self._to_server if to_server else self._to_client

        def arrive() -> None:
            if self.broken or (self.ended.is_set() and not to_server):
                return
            decode = self._decode[to_server]
            pipe.put(decode(item) if isinstance(item, bytes) else item)
            if closes:
                self._finish()

        self._at(pipe, arrive)

    def _later(self, to_server: bool, action: Callable[[], None]) -> None:
        self._at(self._to_server if to_server else self._to_client, action)

    def _at(self, pipe: _Pipe, action: Callable[[], None]) -> None:
        """Runs `action` after a delay, and after all earlier ones."""
        wanted_s = max(pipe.last_s, self._loop.time() + self._network.delay_s())
        pipe.last_s = arrival_s(wanted_s, self.client, self.server) + 1e-9
        self._loop.call_at(pipe.last_s, action)


class ServerEnd:
    """The part of grpc.aio.ServicerContext that our servicers use."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self) -> Any:
        return await self._stream._to_server.get()

    async def write(self, message: Any) -> None:
        self._stream._send(False, message)

    def time_remaining(self) -> float | None:
        return None


def arrival_s(at_s: float, *ends: Host | None) -> float:
    """When a message due at `at_s` arrives between hosts that may be silent."""
    return max([at_s, *(end.silent_until_s + 1e-6 for end in ends if end is not None and end.silent_until_s > at_s)])


class _Requests:
    """Not a generator: an abandoned one ends when the collector finds it, so runs would not be repeatable."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        if (message := await self._pipe.get()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


def _unsupported(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this kind of call is not simulated")


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
