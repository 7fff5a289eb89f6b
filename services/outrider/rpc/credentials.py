"""Certificates as gRPC credentials: who is at the other end, verified by TLS, is told by a role's name.

What gRPC checks of every server, that it has the name that was asked for, is its role here, such as `target.outrider`,
wherever it runs. A server sees the names of its callers in each call; `roles` says what they may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import grpc

from outrider.rpc.certificates import TlsFiles
from outrider.rpc.roles import Role


def cluster_port(
    tls: TlsFiles | None, on_handshake: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials | None:
    """For a port on which every caller has to show a certificate of the same authority; None without files.
    `on_handshake` hears of each connection that begins, on a thread of gRPC's. Raises OSError."""
    if tls is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([_pair(tls)], root_certificates=tls.authority.read_bytes())

    return _reloading(tls, read, require_client=True, on_handshake=on_handshake)


def public_port(tls: TlsFiles | None, on_handshake: Callable[[], None] = lambda: None) -> grpc.ServerCredentials | None:
    """The same for clients, who show no certificate. Raises OSError."""
    if tls is None:
        return None
    return _reloading(
        tls,
        lambda: grpc.ssl_server_certificate_configuration([_pair(tls)]),
        require_client=False,
        on_handshake=on_handshake,
    )


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """As the files are now: a channel keeps what it was made with. Raises OSError."""
    key, certificate = _pair(tls)
    return grpc.ssl_channel_credentials(tls.authority.read_bytes(), key, certificate)


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role]:
    """Those that the other side's certificate names; none without one."""
    names = set(auth_context.get("x509_subject_alternative_name", ()))
    return frozenset(role for role in Role if role.dns_name.encode() in names)


def _pair(tls: TlsFiles) -> tuple[bytes, bytes]:
    return tls.key.read_bytes(), tls.certificate.read_bytes()


def _reloading(
    tls: TlsFiles,
    read: Callable[[], grpc.ServerCertificateConfiguration],
    *,
    require_client: bool,
    on_handshake: Callable[[], None],
) -> grpc.ServerCredentials:
    known = tls.version

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before each handshake; None is for what it has already."""
        nonlocal known
        on_handshake()
        # While files are being replaced, or are gone, the last ones serve.
        with suppress(OSError):
            if (now := tls.version) != known:
                configuration, known = read(), now
                return configuration
        return None

    # The stubs know nothing of None.
    return grpc.dynamic_ssl_server_credentials(read(), changed, require_client)  # type: ignore[arg-type]
