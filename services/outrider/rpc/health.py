"""grpc.health.v1 and server reflection, which all our servers offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_REFLECTION = "grpc.reflection.v1.ServerReflection"


class Health:
    """A server's health status: for the whole server as "", and for each service's name."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = HealthServicer()
        self._names = ("", *services)
        self.serving = False

    async def set_serving(self) -> None:
        await self._set(True)

    async def set_not_serving(self) -> None:
        await self._set(False)

    async def _set(self, serving: bool) -> None:
        self.serving = serving
        for name in self._names:
            await self.servicer.set(name, _SERVING if serving else _NOT_SERVING)


async def add_health(server: grpc.aio.Server, services: Sequence[str]) -> Health:
    """Adds health checks, at first NOT_SERVING, and reflection, for services by their full names."""
    health = Health(services)
    await health.set_not_serving()
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    _add_reflection(server, services)
    return health


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds it as v1 and v1alpha, whose messages have the same encoding. Skipped if not installed."""
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2
        from grpc_reflection.v1alpha._async import ReflectionServicer
    except ImportError:
        return
    names = [*services, "grpc.health.v1.Health", reflection.SERVICE_NAME, _REFLECTION]
    servicer: Any = ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (reflection.SERVICE_NAME, _REFLECTION)
        )
    )
