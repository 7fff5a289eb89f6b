"""Every edge of the cluster, and every certificate that must not open it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.errors import OutriderError
from outrider.rpc.access.certificates import TlsFiles, check_plain, cluster_tls, public_tls
from outrider.rpc.access.credentials import cluster_port, public_port
from outrider.rpc.access.roles import CALLS, Role, RoleGuard, current_caller
from outrider.rpc.channel import ConnectTo, connect_to, create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.status import from_rpc_error
from outrider.telemetry.metrics import Handshakes
from outrider_controller.control.config import ControlConfig
from prometheus_client import CollectorRegistry

from tests.certificates import Cluster
from tests.connections import SERVERS, connections


@dataclass(frozen=True, slots=True)
class Edge:
    caller: Role
    server: Role
    method: str


def _calls_of(caller: Role, server: Role) -> list[str]:
    services = [name for name, role in SERVERS.items() if role is server]
    return [m for m, access in CALLS.items() if caller in access.roles and m.split("/")[1].split(".")[-1] in services]


EDGES = tuple(
    Edge(caller, server, min(_calls_of(caller, server)))
    for caller, server in sorted(connections(), key=lambda ends: (ends[0].value, ends[1].value))
)
edges = pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.caller.value}-{edge.server.value}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield Cluster(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def server_of(edge: Edge, tls: TlsFiles | None) -> AsyncIterator[str]:
    """Answers the call with the name of its caller; its address."""

    async def answer(request: bytes, context: Any) -> bytes:
        return current_caller().name.encode()

    service, _, name = edge.method.removeprefix("/").partition("/")
    server = create_server(guard=RoleGuard(certificates=tls is not None))
    handlers = {name: grpc.unary_unary_rpc_method_handler(answer, bytes, bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    async with serving(server, "127.0.0.1:0", services=[], credentials=cluster_port(tls), grace_s=0) as life:
        yield life.address


async def ask(connect: Callable[[str], grpc.aio.Channel], address: str, edge: Edge) -> bytes:
    async with connect(address) as channel:
        answer: bytes = await channel.unary_unary(edge.method)(b"", timeout=10)
        return answer


async def refusal(connect: Callable[[str], grpc.aio.Channel], address: str, edge: Edge) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(connect, address, edge)
    return from_rpc_error(caught.value)


@edges
async def test_the_role_that_may_call_is_let_in_by_its_certificate(edge: Edge, cluster: Cluster) -> None:
    connect = connect_to(edge.server, cluster.files(edge.caller))
    async with server_of(edge, cluster.files(edge.server)) as address:
        assert await ask(connect, address, edge) == edge.caller.value.encode()


@edges
async def test_a_role_that_may_not_call_is_refused_by_name(edge: Edge, cluster: Cluster) -> None:
    async with server_of(edge, cluster.files(edge.server)) as address:
        for role in set(Role) - CALLS[edge.method].roles:
            error = await refusal(connect_to(edge.server, cluster.files(role)), address, edge)
            assert (error.code.name, error.reason) == ("PERMISSION_DENIED", "WRONG_ROLE")
            assert error.message == f"a {role.value} may not make this call"
        nobody = cluster.issue("nobody", "somewhere.example")
        error = await refusal(connect_to(edge.server, nobody), address, edge)
        assert (error.code.name, error.reason) == ("UNAUTHENTICATED", "NO_ROLE")


@edges
async def test_whoever_has_no_valid_certificate_does_not_get_in(
    edge: Edge, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def without_certificate(address: str) -> grpc.aio.Channel:
        trusting = grpc.ssl_channel_credentials(cluster.authority.pem)
        options = [("grpc.default_authority", edge.server.dns_name)]
        return grpc.aio.secure_channel(address, trusting, options=options)

    callers: dict[str, Callable[[str], grpc.aio.Channel]] = {
        "WRONG_VERSION_NUMBER": create_channel,
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": without_certificate,
        "unable to get local issuer certificate": connect_to(edge.server, cluster.of_another_authority(edge.caller)),
        "certificate has expired": connect_to(edge.server, cluster.expired(edge.caller)),
    }
    async with server_of(edge, cluster.files(edge.server)) as address:
        for reason, connect in callers.items():
            assert (await refusal(connect, address, edge)).code.name == "UNAVAILABLE"
            # Of a client that is refused TLS says nothing to it, and gRPC why on the server's stderr.
            assert reason in capfd.readouterr().err


async def test_failed_handshakes_are_counted_as_connections_without_a_call(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    handshakes, edge = Handshakes(registry), next(edge for edge in EDGES if edge.server is Role.TARGET)
    connect = connect_to(Role.TARGET, cluster.files(Role.ROUTER))
    credentials = cluster_port(cluster.files(Role.TARGET), handshakes.began)
    server = create_server(on_tls_call=handshakes.called)
    async with serving(server, "127.0.0.1:0", services=[], credentials=credentials, grace_s=0) as life:
        before = registry.get_sample_value("outrider_tls_handshakes_total") or 0
        for stranger in (create_channel, connect_to(Role.TARGET, cluster.expired(Role.ROUTER))):
            assert (await refusal(stranger, life.address, edge)).code.name == "UNAVAILABLE"
        assert registry.get_sample_value("outrider_tls_callers_total") == 0
        failed = (registry.get_sample_value("outrider_tls_handshakes_total") or 0) - before
        assert failed >= 2
        async with connect(life.address) as channel:
            for _ in range(3):
                assert await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert registry.get_sample_value("outrider_tls_callers_total") == 1


@edges
async def test_a_server_that_does_not_prove_its_role_is_sent_nothing(edge: Edge, cluster: Cluster) -> None:
    connect = connect_to(edge.server, cluster.files(edge.caller))
    wrong = next(role for role in Role if role is not edge.server)
    servers = {
        "unable to get local issuer certificate": cluster.of_another_authority(edge.server),
        "certificate has expired": cluster.expired(edge.server),
        "Hostname Verification Check failed": cluster.files(wrong),
        "Tls handshake failed": None,
    }
    for reason, tls in servers.items():
        async with server_of(edge, tls) as address:
            error = await refusal(connect, address, edge)
            assert error.code.name == "UNAVAILABLE" and reason in error.message


async def test_replaced_files_count_from_the_next_connection_on(cluster: Cluster, tmp_path: Path) -> None:
    edge, other = (
        next(edge for edge in EDGES if (edge.caller, edge.server) == (Role.ROUTER, Role.TARGET)),
        Cluster(tmp_path),
    )
    server, caller = cluster.files(Role.TARGET, name="server"), cluster.files(Role.ROUTER, name="caller")
    connect = connect_to(Role.TARGET, caller)
    async with server_of(edge, server) as address, connect(address) as first:
        call = first.unary_unary(edge.method)
        assert await call(b"") == b"router"
        replace(server, other.files(Role.TARGET))
        assert await call(b"") == b"router", "a connection that stands goes on"
        assert (await refusal(connect, address, edge)).code.name == "UNAVAILABLE"
        replace(caller, other.files(Role.ROUTER))
        assert await ask(connect, address, edge) == b"router"
        # Half of a replacement, or none of the files, and the last good ones go on.
        server.key.unlink()
        caller.certificate.unlink()
        assert await ask(connect, address, edge) == b"router"


def replace(old: TlsFiles, new: TlsFiles) -> None:
    for path in (new.certificate, new.key, new.authority):
        shutil.copy(path, old.directory / f"{path.name}.new")
        (old.directory / f"{path.name}.new").replace(old.directory / path.name)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("text", [b"", b"no certificate", None])
async def test_files_that_cannot_be_used_leave_the_last_ones_in_use_and_are_logged_once(
    name: str, text: bytes | None, cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty ones would end a process, in gRPC. None: those of another pair, or authority."""
    caplog.set_level(logging.INFO, "outrider")
    edge = next(edge for edge in EDGES if (edge.caller, edge.server) == (Role.ROUTER, Role.TARGET))
    server, caller = cluster.files(Role.TARGET, name="server"), cluster.files(Role.ROUTER, name="caller")
    other = Cluster(tmp_path).files(Role.TARGET)
    connect = ConnectTo(Role.TARGET, caller)
    async with server_of(edge, server) as address:
        assert await ask(connect, address, edge) == b"router"
        version = connect.version
        for files in (server, caller):
            (files.directory / name).write_bytes((other.directory / name).read_bytes() if text is None else text)
        for _ in range(3):
            assert await ask(connect, address, edge) == b"router"
        assert connect.version == version
        warned = [record.getMessage() for record in caplog.records if "stay in use" in record.getMessage()]
        assert sorted(text.split(":")[0] for text in warned) == [str(caller.directory), str(server.directory)]
        cluster.files(Role.TARGET, name="server"), cluster.files(Role.ROUTER, name="caller")
        assert await ask(connect, address, edge) == b"router" and connect.version != version
        assert caplog.text.count("the replaced files are used for new connections") == 2


def test_files_of_another_role_do_not_replace_those_of_a_process(cluster: Cluster) -> None:
    files = ControlConfig(tls_dir=str(cluster.files(Role.CONTROL, name="mounted").directory)).tls
    assert files is not None
    files.check_renewed()
    cluster.files(Role.DRAFT, name="mounted")
    with pytest.raises(OSError, match="Hostname mismatch"):
        files.check_renewed()


async def test_a_public_grpc_port_asks_clients_for_no_certificate(cluster: Cluster) -> None:
    public = cluster.issue("public", "127.0.0.1")
    async with (
        serving(create_server(), "127.0.0.1:0", services=[], credentials=public_port(public)) as life,
        grpc.aio.secure_channel(life.address, grpc.ssl_channel_credentials(cluster.authority.pem)) as channel,
    ):
        await asyncio.wait_for(channel.channel_ready(), 60)


def test_files_that_peers_would_not_take_are_refused_at_start(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster_tls(Role.TARGET, "") is None
    assert cluster_tls(Role.TARGET, str(cluster.files(Role.TARGET).directory)) is not None
    torn = tmp_path / "torn"
    shutil.copytree(cluster.files(Role.TARGET).directory, torn)
    shutil.copy(cluster.files(Role.DRAFT).key, torn / "tls.key")
    refused = {
        "tls_dir: .*: tls.crt: No such file": tmp_path,
        "Hostname mismatch": cluster.files(Role.DRAFT).directory,
        "certificate has expired": cluster.expired(Role.TARGET).directory,
        "unable to get local issuer certificate": cluster.of_another_authority(Role.TARGET).directory,
        "key values mismatch": torn,
    }
    for reason, directory in refused.items():
        with pytest.raises(ValueError, match=f"(?i){reason}"):
            cluster_tls(Role.TARGET, str(directory))
    with pytest.raises(ValueError, match=r"public_tls_dir: .*key values mismatch"):
        public_tls(str(torn))


def test_a_process_with_two_roles_serves_as_either(cluster: Cluster) -> None:
    both = str(cluster.files(Role.ROUTER, Role.CONTROL).directory)
    assert cluster_tls(Role.ROUTER, both) == cluster_tls(Role.CONTROL, both)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "host.example:1"])
def test_plain_text_is_for_loopback_unless_it_is_asked_for_by_name(listen: str) -> None:
    for loopback in ("127.0.0.1:1", "127.0.0.2:0", "[::1]:1", "localhost:1"):
        check_plain("listen", loopback, "", False)
    check_plain("listen", listen, "/tls", False)
    check_plain("listen", listen, "", True)
    with pytest.raises(ValueError, match=r"listen: other machines can reach .* give tls_dir, or insecure"):
        check_plain("listen", listen, "", False)


def test_a_public_context_has_the_files_of_the_time(cluster: Cluster) -> None:
    public = cluster.issue("http", "localhost")
    context, seen = public.public_context(), set()
    for _ in range(2):
        seen.add(served_certificate(context, cluster))
        cluster.issue("http", "localhost")
    assert len(seen) == 2


def test_a_public_context_says_why_it_does_not_take_other_files(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    public = cluster.issue("broken", "localhost")
    context = public.public_context()
    before = served_certificate(context, cluster)
    cluster.issue("other", "localhost")
    shutil.copy(public.directory.with_name("other") / "tls.crt", public.certificate)
    assert [served_certificate(context, cluster) for _ in range(2)] == [before] * 2 and before
    assert caplog.text.count("broken: the files from before stay in use: key values mismatch") == 1


def served_certificate(context: ssl.SSLContext, cluster: Cluster) -> bytes | None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context(cadata=cluster.authority.pem.decode())
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert(binary_form=True)
