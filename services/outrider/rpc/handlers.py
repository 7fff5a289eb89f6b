"""Rebuilds a gRPC handler around another behaviour, for the server's interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Any]
Deserializer: TypeAlias = Callable[[bytes], Any]


def wrapped(handler: Any, wrap: Callable[[Behaviour], Behaviour], deserialize: Deserializer | None = None) -> Handler:
    """A handler of the same one of the four kinds. `deserialize`: replaces the handler's own."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return make(
        wrap(behaviour),
        request_deserializer=deserialize or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
