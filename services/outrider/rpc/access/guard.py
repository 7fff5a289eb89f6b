"""Checks every call against the table in `roles` and may refuse it. The server's guard identifies the caller."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from outrider.errors import PermissionDenied
from outrider.rpc.access.credentials import roles_of
from outrider.rpc.access.revocation import while_admitted
from outrider.rpc.access.roles import ANYBODY, AUTHORIZATION, CALLER, Caller, Guard, access_to, bearer_token
from outrider.rpc.handlers import Behaviour, Context, wrapped

Admit: TypeAlias = Callable[[Context], Awaitable[None]]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Checks every call against the table. Runs inside the interceptor that turns errors into statuses."""

    def __init__(self, guard: Guard, on_tls_call: Callable[[str], None] = lambda peer: None) -> None:
        """`on_tls_call` is called for each call over TLS, with its peer."""
        self._guard = guard
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

        # Checked within the call, because only its context has the peer's certificate.
        return wrapped(handler, functools.partial(_admitted, admit))

    async def _caller(self, method: str, context: Context) -> Caller:
        if context.auth_context().get("transport_security_type") == [b"ssl"]:
            self._on_tls_call(context.peer())
        access = access_to(method)
        if access is None:
            raise PermissionDenied("nobody may make this call", reason="UNDECLARED_CALL")
        if access.open:
            return ANYBODY
        token = token_of(context.invocation_metadata())
        return await self._guard.admit(access, token, roles_of(context.auth_context()))


def token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The bearer token in a call's metadata, empty without one."""
    return next((bearer_token(value) for key, value in metadata or () if key == AUTHORIZATION), "")


def _admitted(admit: Admit, behaviour: Behaviour) -> Behaviour:
    """Wraps a handler so that `admit` runs first."""
    if inspect.isasyncgenfunction(behaviour):
        # Writes the messages instead of yielding them: gRPC does not close a generator when the client disconnects
        # between two messages, so the handler would keep its resources until the garbage collector runs.
        @functools.wraps(behaviour)
        async def admitted_stream(request: Any, context: Context) -> None:
            await admit(context)
            async with while_admitted(CALLER.get()), aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return admitted_stream

    @functools.wraps(behaviour)
    async def admitted(request: Any, context: Context) -> Any:
        await admit(context)
        async with while_admitted(CALLER.get()):
            return await behaviour(request, context)

    return admitted
