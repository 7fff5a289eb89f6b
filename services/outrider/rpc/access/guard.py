"""Checks every call against the table in `roles`, refuses it, or ends it later when its key is revoked."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc

from outrider.errors import InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from outrider.rpc.access.credentials import roles_of
from outrider.rpc.access.roles import ANYBODY, AUTHORIZATION, CALLER, Caller, Guard, access_to, bearer_token
from outrider.rpc.arriving import Arriving
from outrider.rpc.interceptor import Behaviour, Context, wrapped
from outrider.runtime.supervision import background

Admit: TypeAlias = Callable[[Context], Awaitable[None]]
Read: TypeAlias = Callable[[AsyncIterator[Any], Context], Awaitable[Any]]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Checks every call against the table. Runs inside the interceptor that turns errors into statuses."""

    def __init__(
        self,
        guard: Guard,
        on_tls_call: Callable[[str], None] = lambda peer: None,
        arriving: Arriving | None = None,
        arriving_open: Arriving | None = None,
    ) -> None:
        """`on_tls_call` is called for each call over TLS, with its peer. `arriving`: for the messages of admitted
        callers, None: not bounded; `arriving_open`: for those of calls that are open to everybody.
        """
        self._guard = guard
        self._arriving = arriving
        self._arriving_open = arriving_open
        self._on_tls_call = on_tls_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        async def admit(context: Context) -> None:
            CALLER.set(await self._caller(method, context))

        access = access_to(method)
        arriving = self._arriving_open if access is not None and access.open else self._arriving
        # Checked within the call, because only its context has the peer's certificate.
        return wrapped(handler, functools.partial(_admitted, admit, _reader(arriving, handler.request_streaming)))

    async def _caller(self, method: str, context: Context) -> Caller:
        if context.auth_context().get("transport_security_type") == [b"ssl"]:
            self._on_tls_call(context.peer())
        access = access_to(method)
        if access is None:
            raise PermissionDenied("this call is not open to any role", reason="UNDECLARED_CALL")
        if access.open:
            return ANYBODY
        token = token_of(context.invocation_metadata())
        return await self._guard.admit(access, token, roles_of(context.auth_context()))


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The bearer token in a call's metadata, empty without one."""
    return next((bearer_token(value) for key, value in metadata or () if key == AUTHORIZATION), "")


def _reader(arriving: Arriving | None, streaming: bool) -> Read:
    """Makes of a call's messages, which come when they are asked for, what its handler takes.

    They are read from the context: gRPC's iterator over them keeps the last one for ever if it is not read to its end.
    """
    take = arriving.take if arriving is not None else _unbounded

    async def messages(context: Context) -> AsyncIterator[Any]:
        while (message := await take(context.read)) is not grpc.aio.EOF:
            yield message

    async def stream(requests: AsyncIterator[Any], context: Context) -> Any:
        # What a role streams is bounded by its handler.
        return requests if arriving is None else messages(context)

    async def one(requests: AsyncIterator[Any], context: Context) -> Any:
        if (message := await take(context.read)) is grpc.aio.EOF:
            raise InvalidRequest("request", "the call has no message")
        return message

    return stream if streaming else one


async def _unbounded(read: Callable[[], Awaitable[Any]]) -> Any:
    return await read()


def _admitted(admit: Admit, read: Read, behaviour: Behaviour) -> Behaviour:
    """Wraps a handler so that `admit` runs first, before any message is read."""
    if inspect.isasyncgenfunction(behaviour):
        # Writes the messages instead of yielding them: gRPC does not close a generator when the client disconnects
        # between two messages, so the handler would keep its resources until the garbage collector runs.
        @functools.wraps(behaviour)
        async def admitted_stream(requests: AsyncIterator[Any], context: Context) -> None:
            await admit(context)
            request = await read(requests, context)
            async with while_admitted(CALLER.get()), aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return admitted_stream

    @functools.wraps(behaviour)
    async def admitted(requests: AsyncIterator[Any], context: Context) -> Any:
        await admit(context)
        request = await read(requests, context)
        async with while_admitted(CALLER.get()):
            return await behaviour(request, context)

    return admitted


RECHECK_S = 20.0


@asynccontextmanager
async def while_admitted(caller: Caller) -> AsyncIterator[None]:
    """Cancels the block and raises Unauthenticated or PermissionDenied at the first check that the caller fails."""
    if caller.check is None:
        yield
        return
    refusals: list[Exception] = []
    try:
        async with asyncio.timeout(None) as ended, background(_recheck(caller, ended, refusals), "recheck key"):
            yield
    except TimeoutError:
        if not ended.expired():
            raise
        raise refusals[0] from None


async def _recheck(caller: Caller, ended: asyncio.Timeout, refusals: list[Exception]) -> None:
    while caller.check is not None:
        await asyncio.sleep(RECHECK_S)
        try:
            await caller.check()
        except (Unauthenticated, PermissionDenied) as refusal:
            refusals.append(refusal)
            ended.reschedule(asyncio.get_running_loop().time())
            return
        except Unavailable:
            # The store is away: what was known last holds.
            continue
