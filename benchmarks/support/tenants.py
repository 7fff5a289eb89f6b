"""Tenants for measurements, made as an operator makes them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial

from outrider.rpc.v1 import control_pb2, tenants_pb2
from outrider_controller.cli.clusters.control import Control, call_control
from outrider_controller.cli.up.stack import Stack


async def make_tenants(stack: Stack, names: Sequence[str]) -> dict[str, str]:
    """Makes the tenants and returns their API keys."""
    given = [tenants_pb2.Tenant(name=name) for name in names]
    await call_control(stack.control, lambda stub: stub.PutTenants(control_pb2.PutTenantsRequest(tenants=given)))
    made = [control_pb2.CreateKeyRequest(tenant=name) for name in names]
    return {one.tenant: (await call_control(stack.control, partial(create_key, one))).key for one in made}


def create_key(request: control_pb2.CreateKeyRequest, stub: Control) -> Awaitable[control_pb2.CreateKeyResponse]:
    return stub.CreateKey(request)
