"""Certificates as gRPC credentials. Each certificate names a role, which TLS verifies.

The server name that gRPC verifies is a role, such as `target.outrider`, on every host. In each call a server gets the
names in the caller's certificate; `roles` defines what they may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import grpc

from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import Role


def cluster_port(
    tls: TlsFiles | None, on_handshake: Callable[[], None] = lambda: None
) -> grpc.ServerCredentials | None:
    """For a port on which every caller must have a certificate of the same authority; None without files.
    `on_handshake` is called for each new connection, on a gRPC thread. Raises OSError."""
    if tls is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([_pair(tls)], root_certificates=tls.authority.read_bytes())

    return _reloading(tls, read, require_client=True, on_handshake=on_handshake)


def public_port(tls: TlsFiles | None, on_handshake: Callable[[], None] = lambda: None) -> grpc.ServerCredentials | None:
    """The same for clients without certificates. Raises OSError."""
    if tls is None:
        return None
    return _reloading(
        tls,
        lambda: grpc.ssl_server_certificate_configuration([_pair(tls)]),
        require_client=False,
        on_handshake=on_handshake,
    )


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials from the current files; a channel keeps those it was made with. Raises OSError."""
    key, certificate = _pair(tls)
    return grpc.ssl_channel_credentials(tls.authority.read_bytes(), key, certificate)


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role]:
    """The roles in the peer's certificate; empty without one."""
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
        """gRPC calls it before each handshake; None means no change."""
        nonlocal known
        on_handshake()
        # While files are missing or being replaced, the last ones are used.
        with suppress(OSError):
            if (now := tls.version) != known:
                configuration, known = read(), now
                return configuration
        return None

    # The type stubs do not allow None.
    return grpc.dynamic_ssl_server_credentials(read(), changed, require_client)  # type: ignore[arg-type]
