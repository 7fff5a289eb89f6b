"""Calls to the control plane and to routers, with the operator's credential and a time limit; and connections, with an
operator's certificate, and to a gateway with TLS, where asked for.

OUTRIDER_TLS_DIR names a directory with tls.crt, tls.key and ca.crt of an operator. OUTRIDER_GATEWAY_CA names a file
with the authority of the gateway's certificate, or is `system` for those that this machine trusts. Where they are not
set, the context has them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
import grpc
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import Role, bearer
from outrider.rpc.channel import connect_to, create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2

from outrider_controller.cli.clusters import contexts
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.models import DEFAULT_TARGET
from outrider_controller.cli.output import output_option

_DEFAULTS = {"grpc": "127.0.0.1:8001", "control": "127.0.0.1:8002", "model": DEFAULT_TARGET}

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Control: TypeAlias = "control_pb2_grpc.ControlServiceAsyncStub"
TIMEOUT_S = 15.0
"""Of one call that is answered at once."""


def endpoint_option(flag: str, what: str, env: str, explanation: str) -> Callable[[F], F]:
    """An option whose default is looked up when the command runs."""
    return click.option(
        flag,
        what,
        envvar=env,
        show_envvar=True,
        default=lambda: _find(what),
        metavar="NAME" if what == "model" else "HOST:PORT",
        help=f"{explanation}; default: that of the context.",
    )


def context_option(command: F) -> F:

    def keep(ctx: click.Context, param: click.Parameter, value: str) -> None:
        contexts.want(ctx, contexts.check_name(ctx, param, value))

    return click.option(
        "--context",
        envvar="OUTRIDER_CONTEXT",
        show_envvar=True,
        default="",
        metavar="NAME",
        callback=keep,
        # The endpoints' defaults depend on it.
        is_eager=True,
        expose_value=False,
        help="Cluster or stack to ask, by its name; see `outrider get contexts`.",
    )(command)


def _find(what: str) -> str:
    """`grpc`, `control` or `model` of the context that is meant."""
    context = contexts.chosen(click.get_current_context())
    found = context.endpoints[what] if context is not None else _DEFAULTS[what]
    if not found:
        assert context is not None
        raise click.UsageError(f"{context.name} has no {what}: give it here, or with outrider config set-context")
    return found


def control_options(*outputs: str) -> Callable[[F], F]:
    """--context, --control, and -o with these formats."""

    def decorate(command: F) -> F:
        control = endpoint_option("--control", "control", "OUTRIDER_CONTROL", "Control plane to ask")
        return context_option(control(output_option(*outputs)(command)))

    return decorate


def _cluster_channel(role: Role, address: str) -> grpc.aio.Channel:
    """To the control plane or a router. Raises OSError when the files cannot be read."""
    tls_dir = os.environ.get("OUTRIDER_TLS_DIR") or contexts.cluster_at(control=address).tls_dir
    return connect_to(role, TlsFiles(Path(tls_dir).expanduser()) if tls_dir else None)(address)


def gateway_channel(address: str) -> grpc.aio.Channel:
    """To public gRPC. Raises OSError when the file cannot be read."""
    named = contexts.cluster_at(gateway=address)
    authority = os.environ.get("OUTRIDER_GATEWAY_CA") or named.gateway_ca
    if not authority:
        return create_channel(address)
    trusted = None if authority == "system" else Path(authority).expanduser().read_bytes()
    credentials = grpc.ssl_channel_credentials(trusted)
    return create_channel(address, credentials=credentials, server_name=named.server_name)


class _OperatorChannel:
    """Adds the credential and the time limit to each call that has none of its own."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._added: dict[str, Any] = {"timeout": TIMEOUT_S, "metadata": bearer(token)}

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        """`unary_unary` and the like: makes the callable of one method."""
        make = getattr(self._channel, kind)
        return lambda *method, **options: partial(make(*method, **options), **self._added)


@asynccontextmanager
async def operator_channel(role: Role, address: str, where: str = "", token: str = "") -> AsyncIterator[Any]:
    """For stubs of the control plane or of a router. Without a token, that of the stack at `address`.

    Raises CommandError, which begins with `where`.
    """
    asked = f"{'control plane' if role is Role.CONTROL else role.value} at {address}"
    async with _cluster_channel(role, address) as channel:
        try:
            yield _OperatorChannel(channel, token or contexts.operator_token(address))
        except grpc.RpcError as error:
            raise CommandError.of(from_rpc_error(error), where or asked) from error


def ask_control(address: str, ask: Callable[[Control], Awaitable[R]], where: str = "") -> R:
    """Calls `ask(stub)`. Raises CommandError, which begins with `where`."""
    return asyncio.run(call_control(address, ask, where))


async def call_control(address: str, ask: Callable[[Control], Awaitable[R]], where: str = "", token: str = "") -> R:
    """The same in an event loop."""
    async with operator_channel(Role.CONTROL, address, where, token) as channel:
        return await ask(control_pb2_grpc.ControlServiceStub(channel))


async def list_workers(
    address: str, role: worker_pb2.WorkerRole.ValueType = worker_pb2.WORKER_ROLE_UNSPECIFIED, token: str = ""
) -> control_pb2.ListWorkersResponse:
    """Asks the control plane. Raises CommandError."""
    request = control_pb2.ListWorkersRequest(role=role)
    return await call_control(address, lambda stub: stub.ListWorkers(request), token=token)


async def list_models(router: str, token: str = "") -> list[router_pb2.ServedModel]:
    """Asks one router what it serves, and with how many workers. Raises CommandError."""
    async with operator_channel(Role.ROUTER, router, token=token) as channel:
        answer = await router_pb2_grpc.RouterServiceStub(channel).ListModels(router_pb2.ListModelsRequest())
        return list(answer.models)
