"""Every call and route says who may make it, and callers are held to that."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import outrider.rpc.v1
import pytest
from google.protobuf.descriptor import FileDescriptor
from outrider.errors import OutriderError
from outrider.gateway.config import GatewayLimits
from outrider.gateway.http.access import guarded
from outrider.gateway.http.app import create_app
from outrider.gateway.tenants.auth import KeyGuard
from outrider.rpc.access.roles import (
    CALLS,
    ROUTES,
    ClusterSecret,
    Role,
    RoleGuard,
    Undeclared,
    bearer,
    bearer_token,
    check_declared,
)
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import router_pb2, router_pb2_grpc
from outrider.telemetry.metrics import RefusedCalls
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from tests.connections import SERVERS, connections

SECRET = ClusterSecret(b"0123456789abcdef")


def services() -> list[str]:
    """Full names of every service in proto/."""
    folder = Path(next(iter(outrider.rpc.v1.__path__)))
    modules = [import_module(f"outrider.rpc.v1.{file.stem}") for file in folder.glob("*_pb2.py")]
    descriptors: list[FileDescriptor] = [module.DESCRIPTOR for module in modules]
    return [service.full_name for file in descriptors for service in file.services_by_name.values()]


def test_every_call_of_every_service_is_declared_and_none_besides() -> None:
    found = services()
    assert len(found) >= 6
    check_declared(found)
    assert set(CALLS) == {f"/{name}/{method}" for name in found for method in _methods(name)}


def _methods(service: str) -> list[str]:
    from google.protobuf import descriptor_pool

    return [method.name for method in descriptor_pool.Default().FindServiceByName(service).methods]


def test_every_route_of_the_gateway_is_declared_and_none_besides() -> None:
    nobody: Any = SimpleNamespace(quotas=None, admission=None)  # Nobody asks it anything.
    app = create_app(nobody, GatewayLimits(), KeyGuard(None))
    assert {route.path for route in app.routes if isinstance(route, Route)} == set(ROUTES)


def test_an_application_with_an_undeclared_route_is_not_made() -> None:
    quotas: Any = None
    with pytest.raises(Undeclared, match="/v1/new"):
        guarded([Route("/v1/new", lambda request: None)], KeyGuard(None), quotas, quotas)


async def test_a_server_with_an_undeclared_call_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CALLS, "/outrider.rpc.v1.RouterService/ListModels")
    with pytest.raises(Undeclared, match="ListModels"):
        async with serving(create_server(), "127.0.0.1:0", services=["outrider.rpc.v1.RouterService"]):
            pass


def test_a_role_cannot_be_made_up_and_follows_from_no_other() -> None:
    tokens = {role: SECRET.token(role) for role in Role}
    assert len(set(tokens.values())) == len(Role)
    assert all(SECRET.role_of(token) is role for role, token in tokens.items())
    assert ClusterSecret(b"another secret!!").role_of(tokens[Role.GATEWAY]) is None
    assert SECRET.role_of("") is None and SECRET.role_of("é") is None
    with pytest.raises(ValueError, match="cluster_secret"):
        ClusterSecret(b"short")
    assert b"0123" not in repr(SECRET).encode()


def test_the_bearer_token_is_read_as_rfc_6750_has_it() -> None:
    assert bearer_token("Bearer abc") == bearer_token("bearer  abc ") == "abc"
    assert bearer_token("Basic abc") == bearer_token(None) == bearer_token("abc") == ""


class Models(router_pb2_grpc.RouterServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> Any:
        return router_pb2.ListModelsResponse(models=[router_pb2.ServedModel(model="m")])

    async def RouteMany(self, requests: Any, context: Any) -> Any:
        async for _ in requests:
            yield router_pb2.RouteManyResponse(responses=[router_pb2.RouteResponse(token_ids=[1])])


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (SECRET.token(Role.GATEWAY), None),
        (SECRET.token(Role.TARGET), "WRONG_ROLE"),
        ("outrider-gateway-00", "NO_ROLE"),
        ("", "NO_ROLE"),
    ],
)
async def test_a_router_takes_requests_from_gateways_alone(token: str, reason: str | None) -> None:
    registry = CollectorRegistry()
    refused = RefusedCalls(registry, ["outrider.rpc.v1.RouterService"])
    server = create_server(guard=RoleGuard(SECRET), on_refused=refused.count)
    router_pb2_grpc.add_RouterServiceServicer_to_server(Models(), server)
    async with (
        serving(server, "127.0.0.1:0", services=["outrider.rpc.v1.RouterService"]) as life,
        create_channel(life.address) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            answer = await stub.ListModels(router_pb2.ListModelsRequest(), metadata=bearer(token))
            assert reason is None and answer.models[0].model == "m"
            call = stub.RouteMany(iter([router_pb2.RouteManyRequest()]), metadata=bearer(token))
            assert [message.responses[0].token_ids async for message in call] == [[1]]
        except grpc.aio.AioRpcError as error:
            assert from_rpc_error(error).reason == reason
    counted = {"call": "RouterService/ListModels", "reason": reason or ""}
    assert registry.get_sample_value("outrider_refused_calls_total", counted) == (None if reason is None else 1.0)


async def test_a_call_that_nobody_declared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = create_server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(Models(), server)
    async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
        monkeypatch.delitem(CALLS, "/outrider.rpc.v1.RouterService/ListModels")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router_pb2_grpc.RouterServiceStub(channel).ListModels(router_pb2.ListModelsRequest())
        assert from_rpc_error(caught.value).reason == "UNDECLARED_CALL"


ERASURES = {"AttachService/EraseHistory", "TargetService/EraseHistory", "TraceService/EraseTraces"}
READS = {f"TraceService/{name}" for name in ("GetTrace", "GetActivity", "ExportTraces")}
REACH = {
    Role.GATEWAY: {f"RouterService/{name}" for name in ("RouteMany", "GetTokenizer", "ListModels")},
    Role.ROUTER: {"PolicyService/Follow", *(f"TargetService/{name}" for name in ("GetInfo", "Verify", "GetTokenizer"))},
    Role.TARGET: {"AttachService/Attach", "DraftService/GetInfo", "DraftService/Draft"},
    Role.DRAFT: set(),
    Role.CONTROL: {"RouterService/GetTokenizer", "RouterService/ListModels", *ERASURES, *READS},
    Role.OPERATOR: {"RouterService/ListModels", "ControlService/*", *READS},
}
"""What a stolen token of each role can call, besides what everybody can: docs/security.md tells what that does."""


@pytest.mark.parametrize("role", Role)
async def test_a_stolen_token_can_make_the_calls_of_its_role_and_no_other(role: Role) -> None:
    guard, made = RoleGuard(SECRET), set()
    for method, access in CALLS.items():
        name = method.removeprefix("/outrider.rpc.v1.")
        with suppress(OutriderError):
            if not access.open and await guard.admit(access, SECRET.token(role)):
                made.add("ControlService/*" if name.startswith("ControlService/") else name)
    assert made == REACH[role]
    page = (Path(__file__).resolve().parents[4] / "docs/security.md").read_text()
    assert (
        f"\n| {'control' if role is Role.CONTROL else role.value} |" in page.partition("stolen credential can do\n")[2]
    )


def test_every_service_has_a_server() -> None:
    assert {name.rpartition(".")[2] for name in services()} == set(SERVERS)


def test_the_page_on_security_has_the_connections_of_the_table() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/security.md").read_text()
    names = {"control plane": Role.CONTROL, **{role.value: role for role in Role}}
    found = set()
    for line in page.partition("| from | to |")[2].partition("\n\n")[0].splitlines()[2:]:
        callers, server = (cell.strip() for cell in line.split("|")[1:3])
        ends = ((names.get(caller.removesuffix("s")), names.get(server)) for caller in callers.split(", "))
        found |= {pair for pair in ends if None not in pair}
    assert found == connections()
