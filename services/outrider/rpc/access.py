"""Holds every call to the table in `roles`. Knows how to refuse one; who calls is for the server's guard to say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import grpc

from outrider.errors import OutriderError, PermissionDenied
from outrider.rpc.roles import ANYBODY, AUTHORIZATION, CALLER, Caller, Guard, access_to, bearer_token


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Holds every call to the table. Below the interceptor that turns errors into statuses."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            CALLER.set(await self._caller(handler_call_details))
        except OutriderError as error:
            return _refusing(handler, error)
        return handler

    async def _caller(self, details: grpc.HandlerCallDetails) -> Caller:
        access = access_to(details.method)
        if access is None:
            raise PermissionDenied("nobody may make this call", reason="UNDECLARED_CALL")
        if access.open:
            return ANYBODY
        return await self._guard.admit(access, token_of(details.invocation_metadata))


def token_of(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The bearer token in a call's metadata, empty without one."""
    return next((bearer_token(value) for key, value in metadata or () if key == AUTHORIZATION), "")


def _refusing(handler: Any, error: OutriderError) -> Any:
    """A handler of the same kind that only fails."""

    async def refuse(request: Any, context: Any) -> None:
        raise error

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(
        cast(Any, refuse),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
