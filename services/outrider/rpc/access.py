"""Holds every call to the table in `roles`. Knows how to refuse one; who calls is for the server's guard to say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from outrider.errors import PermissionDenied
from outrider.rpc.credentials import roles_of
from outrider.rpc.handlers import Behaviour, Context, wrapped
from outrider.rpc.roles import ANYBODY, AUTHORIZATION, CALLER, Caller, Guard, access_to, bearer_token

Admit: TypeAlias = Callable[[Context], Awaitable[None]]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Holds every call to the table. Below the interceptor that turns errors into statuses."""

    def __init__(self, guard: Guard, on_tls_call: Callable[[str], None] = lambda peer: None) -> None:
        """`on_tls_call` hears of each call over TLS, with the peer that makes it."""
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

        # Not before the call: whose certificate it is, only a call's context knows.
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
    """Lets in whom `admit` does."""
    if inspect.isasyncgenfunction(behaviour):
        # Written out instead of yielded on: gRPC leaves a generator unclosed when the client goes away between two
        # messages, and what the handler holds would stay held until the garbage collector comes by.
        @functools.wraps(behaviour)
        async def admitted_stream(request: Any, context: Context) -> None:
            await admit(context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return admitted_stream

    @functools.wraps(behaviour)
    async def admitted(request: Any, context: Context) -> Any:
        await admit(context)
        return await behaviour(request, context)

    return admitted
