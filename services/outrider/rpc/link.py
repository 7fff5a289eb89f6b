"""One stream between two processes: who reads and who writes, what ends it, and when it comes back.

The end that calls is a `PeerLink`. The end that answers is a handler that writes with `answering`. What waits for the
other end is in an `Outbox`, and is dropped with the stream. Nothing is sent twice: what a stream carried goes on as its
owner decides.

| | who reconnects | what goes on |
|---|---|---|
| gateway → router | its next request opens another stream | each request continues at another router |
| router → target | the router, with growing pauses, while it has a lease | requests fail over to another target |
| target → draft | nobody; the router names a draft again | sequences go on without this draft |
| router → control plane | the router, at whichever leads | the leader begins with all its decisions |
| server with requests of its own → router | the server, at its next address | it announces its open sequences again |

A gateway's stream shares its channel with other calls, so it uses `converse` alone. A control plane has no outbox: for
each router it keeps the latest decision on each tenant, and not what it has decided before.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import grpc

from outrider.errors import Code, DeadlineExceeded, OutriderError
from outrider.rpc.channel import Connect
from outrider.rpc.outbox import Outbox
from outrider.rpc.status import from_rpc_error
from outrider.runtime.supervision import Backoff, keep_running, until_first_ends

log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")
Box = TypeVar("Box", bound=Outbox[Any])
Over = Callable[[], Coroutine[Any, Any, None]]

GRACE_S = 1.0
"""For the last write: if a peer has stopped reading, a write to it never ends."""


class StreamEnded(OutriderError):
    """The stream is unusable; the message has the reason. As any error of a transport, it has no reason code."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = None


async def read_stream(stream: Any, received: Callable[[Any], None]) -> None:
    """Passes each message to `received`, until the other end sends no more."""
    while (message := await read_message(stream)) is not grpc.aio.EOF:
        received(message)
        # Not held until the next one comes: it may have a tenant's text.
        del message


async def read_message(stream: Any) -> Any:
    """The next message, or `grpc.aio.EOF`. Raises StreamEnded for bytes that do not parse."""
    message = await stream.read()
    if message is None:
        raise StreamEnded("a message cannot be read")
    return message


async def write_stream(stream: Any, outbox: Outbox[Any]) -> None:
    """Writes what waits, until the outbox ends."""
    while (message := await outbox.take()) is not None:
        await stream.write(message)
        del message


# -- the end that calls


async def converse(
    call: Any, received: Callable[[Any], None], outbox: Outbox[Any], *others: Coroutine[Any, Any, None]
) -> NoReturn:
    """Reads and writes, with the other work beside, until one of them ends; then hangs up.

    Raises OutriderError: why it has ended, with the status of a server that ended it.
    """
    try:
        with _errors():
            await until_first_ends(
                read_stream(call, received), write_stream(call, outbox), outbox.broken_off(), *others
            )
            raise StreamEnded(f"stream ended: {await call.details() or await call.code()}")
    finally:
        call.cancel()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.InvalidStateError as error:
        raise StreamEnded("stream ended while writing") from error
    except TimeoutError as error:
        raise StreamEnded("no answer in time") from error


class PeerLink(ABC, Generic[A, Box]):
    """A stream to a peer of one kind. A: messages from it."""

    level = logging.WARNING
    """Of the log lines about foreseen ends."""

    def __init__(self, peer: str, connect: Connect, outbox: Box, address: str = "") -> None:
        self.peer = peer
        """What it is, for logs."""
        self.address = address
        """HOST:PORT that it connects to, or did last."""
        self.outbox = outbox
        self._connect = connect
        self._reported: set[str] = set()

    async def keep(self, addresses: Iterable[str], backoff: Backoff) -> None:
        """Connects again whenever the stream has ended, to one address after the other."""
        rest = iter(addresses)

        async def talk() -> None:
            self.address = next(rest)
            raise await self.talk()

        await keep_running(talk, backoff, lambda error: None)

    async def talk(self) -> Exception:
        """One connection, from its beginning to its end. Returns why it has ended; an OutriderError if foreseen."""
        why: Exception | None = None
        try:
            with _errors():
                async with self._connect(self.address) as channel:
                    call = await self._call(channel)
                    await converse(call, self._received, self.outbox, self._watch(call))
        except Exception as error:
            why = error
            self._report(error)
            return error
        finally:
            self.outbox.clear()
            self._ended(why)

    def _connected(self) -> None:
        log.info("%s at %s: connected", self.peer, self.address)
        self._reported.clear()

    def _report(self, error: Exception) -> None:
        """Once for each problem, until it is connected again."""
        foreseen = isinstance(error, OutriderError)
        if (problem := problem_of(error)) not in self._reported:
            level = self.level if foreseen else logging.ERROR
            log.log(level, "%s at %s: %s", self.peer, self.address, problem, exc_info=None if foreseen else error)
        self._reported.add(problem)

    @abstractmethod
    async def _call(self, channel: grpc.aio.Channel) -> Any:
        """Begins the call, once this is the peer that was meant. Raises StreamEnded."""

    @abstractmethod
    def _received(self, message: A) -> None: ...

    @abstractmethod
    async def _watch(self, call: Any) -> None:
        """Runs beside; ends the stream when it ends."""

    @abstractmethod
    def _ended(self, why: Exception | None) -> None:
        """After each attempt. None: the link was stopped."""


def problem_of(error: Exception) -> str:
    """The error as text; of an unforeseen one only its type."""
    return str(error) if isinstance(error, OutriderError) else type(error).__name__


async def watch_silence(
    silent_s: Callable[[], float], probe: Callable[[], Awaitable[object]], every_s: float, after_s: float, most: int
) -> NoReturn:
    """Looks at a peer `every_s` seconds, and probes one that was silent for `after_s`: it may be in a long step. Any
    answer counts: a worker that drains or is not ready still works on its open sequences. Raises StreamEnded after
    `most` probes without one."""
    failed = 0
    while failed < most:
        await asyncio.sleep(every_s)
        if silent_s() < after_s:
            failed = 0
            continue
        try:
            await probe()
            failed = 0
        except grpc.RpcError:
            failed += 1
    raise StreamEnded(f"silent for {silent_s():.1f} s, and does not answer")


# -- the end that answers


@asynccontextmanager
async def answering(context: Any, outbox: Outbox[Any]) -> AsyncIterator[Over]:
    """Writes what waits within the block, and drops the rest at its end. Gives what ends, or raises, when the stream
    shall end for the writer's sake.

    A message is not interrupted: gRPC takes one operation at a time, and the end of the call is one too. So the status
    could not be sent, and the client would wait for it for ever.
    """
    writer = asyncio.create_task(write_stream(context, outbox), name="write stream")

    async def over() -> None:
        await until_first_ends(_end_of(writer), outbox.broken_off())

    try:
        yield over
    finally:
        # A peer that does not read gets no time to read the rest, and is told why once it reads.
        grace_s = None if outbox.unread else GRACE_S
        outbox.clear()
        outbox.end()
        # If the client has disconnected, the current write fails, and the handler may be cancelled here.
        writer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({writer}, timeout=grace_s)
        finally:
            writer.cancel()


async def _end_of(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
    task.result()


async def write_whole(context: Any, message: Any) -> None:
    """A write that is not interrupted, as in `answering`; for a handler whose messages are not in an outbox."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait({writing}, timeout=GRACE_S)


async def write_within(context: Any, message: Any, timeout_s: float) -> None:
    """Raises DeadlineExceeded for a client that does not read, because its request would keep its place for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"nothing was read for {timeout_s:g} s") from error
