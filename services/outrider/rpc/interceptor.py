"""Turns any exception of a handler into a status that tells the cause.

An `OutriderError` becomes its own status, bytes that are no message INVALID_ARGUMENT, and too large ones
RESOURCE_EXHAUSTED. Any other exception is an internal error: the client gets only INTERNAL. The log has the place where
it was raised, but not its message, which may quote the client's text.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import Code, InternalError, InvalidRequest, OutriderError, make_error, without_frames
from outrider.rpc.status import abort

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Any]
Deserializer: TypeAlias = Callable[[bytes], Any]

logger = logging.getLogger(__name__)

Check: TypeAlias = Callable[[Deserializer, bytes], Any]
Refusing: TypeAlias = Callable[[Context], Awaitable[None]]
OnRefused: TypeAlias = Callable[[str, str], None]
"""Called with a method's full name and the reason. Must neither raise nor block."""

_TOO_LARGE = "MESSAGE_TOO_LARGE"
_OF_THE_CALLER = (Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


def wrapped(handler: Any, wrap: Callable[[Behaviour], Behaviour], deserialize: Deserializer | None = None) -> Handler:
    """A handler that answers as before, and gets its messages one by one, also where there is only one: gRPC reads a
    single message before it calls a handler, whoever sent it. `deserialize`: replaces the handler's own.
    """
    streaming = handler.response_streaming
    make = grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return make(
        wrap(behaviour),
        request_deserializer=deserialize or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers that `access` has wrapped, which are coroutines that read their messages."""

    def __init__(
        self,
        max_message_bytes: int,
        strict: Collection[str] = (),
        on_refused: OnRefused = lambda method, reason: None,
        refusing: Refusing | None = None,
    ) -> None:
        """`max_message_bytes`: limit of a request. `strict`: services (full names) that refuse a request with a field
        that this release does not know. `on_refused` is called for each invalid or forbidden call; `refusing` is
        awaited before any error is sent.
        """
        self._max_message_bytes = max_message_bytes
        self._strict = frozenset(strict)
        self._on_refused = on_refused
        self._refusing = refusing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        # None: an unknown method.
        if handler is None:
            return None
        method = handler_call_details.method
        check = functools.partial(_checked, self._max_message_bytes, method.split("/")[1] in self._strict)
        return _guard_handler(handler, method, check, self._on_refused, self._refusing)


def _guard_handler(
    handler: Any, method: str, check: Check, on_refused: OnRefused, refusing: Refusing | None
) -> Handler:
    deserialize = functools.partial(check, handler.request_deserializer)
    # Messages are read inside the handler, whose errors `_guard` catches.
    return wrapped(handler, lambda behaviour: _guard(behaviour, method, on_refused, refusing), deserialize)


def _checked(max_bytes: int, strict: bool, deserialize: Deserializer, data: bytes) -> Any:
    """The message. Raises OutriderError."""
    if len(data) > max_bytes:
        message = f"a message of {len(data)} bytes; at most {max_bytes}"
        raise make_error(Code.RESOURCE_EXHAUSTED, message, reason=_TOO_LARGE)
    try:
        message = deserialize(data)
    except DecodeError:
        raise InvalidRequest("request", "the bytes are no message of this call") from None
    if strict:
        check_known(message)
    return message


def _guard(behaviour: Behaviour, method: str, on_refused: OnRefused, refusing: Refusing | None) -> Behaviour:
    @functools.wraps(behaviour)
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            if isinstance(error, OutriderError) and (error.code in _OF_THE_CALLER or error.reason == _TOO_LARGE):
                on_refused(method, error.reason or error.default_reason)
            if refusing is not None:
                await refusing(context)
            ended = await _ended(context, error, method)
        # gRPC's context holds what ends the call: were it held by that one's frames, both would wait for a collection.
        del request, context
        try:
            raise ended
        finally:
            del ended

    return guarded


async def _ended(context: Context, error: Exception, method: str) -> Exception:
    """What to raise: the call has the error's status by then."""
    # The handler has aborted the call itself, with its own status.
    if isinstance(error, grpc.aio.AbortError):
        return without_frames(error)
    if not isinstance(error, OutriderError):
        logger.error("%s in %s\n%s", type(error).__name__, method, frames(error))
        error = InternalError("internal error")
    try:
        await abort(context, error)
    except grpc.aio.AbortError as aborted:
        return without_frames(aborted)


def frames(error: Exception) -> str:
    """The lines of code where it was raised, without any values."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__))).rstrip()


def check_known(message: Message, path: str = "") -> None:
    """Raises InvalidRequest with the path in the request, and the unknown number."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(path or "request", f"field number {number} is not known here", reason="UNKNOWN_FIELD")
    for field, value in message.ListFields():
        for name, inner in _messages(field, value):
            check_known(inner, f"{path}.{name}" if path else name)


def _messages(field: FieldDescriptor, value: Any) -> Iterable[tuple[str, Message]]:
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            return ()
        return [(f"{field.name}[{key}]", inner) for key, inner in value.items()]
    if field.is_repeated:
        return [(f"{field.name}[{index}]", inner) for index, inner in enumerate(value)]
    return [(field.name, value)]
