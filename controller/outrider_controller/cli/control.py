"""Calls to the control plane, with the operator's credential."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from outrider.rpc.roles import Role, bearer
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2_grpc

from outrider_controller.cli.channels import cluster_channel
from outrider_controller.cli.contexts import operator_token
from outrider_controller.cli.endpoints import endpoint_option
from outrider_controller.cli.exits import CommandError

R = TypeVar("R")
Control: TypeAlias = "control_pb2_grpc.ControlServiceAsyncStub"
Credential = tuple[tuple[str, str], ...]
"""Metadata of a call."""
TIMEOUT_S = 15.0
"""Of one call that is answered at once."""
control_option = endpoint_option("--control", "control", "OUTRIDER_CONTROL", "Control plane to ask")


def ask_control(address: str, ask: Callable[[Control, Credential], Awaitable[R]], where: str = "") -> R:
    """Calls `ask(stub, metadata)` with the operator's credential. Raises CommandError, which begins with `where`."""

    return asyncio.run(call_control(address, ask, where))


async def call_control(address: str, ask: Callable[[Control, Credential], Awaitable[R]], where: str = "") -> R:
    """The same in an event loop."""
    async with cluster_channel(Role.CONTROL, address) as channel:
        credential = bearer(operator_token(address))
        try:
            return await ask(control_pb2_grpc.ControlServiceStub(channel), credential)
        except grpc.RpcError as error:
            raise CommandError.of(from_rpc_error(error), where or f"control plane at {address}") from error
