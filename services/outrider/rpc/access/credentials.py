"""Certificates as gRPC credentials. Each certificate names a role, which TLS verifies.

The server name that gRPC verifies is a role, such as `target.outrider`, on every host. In each call a server gets the
names in the caller's certificate; `roles` defines what they may call.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping

import grpc

from outrider.rpc.access.certificates import Latest, TlsFiles
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

    return _reloading(Latest(tls, read, tls.check_renewed), require_client=True, on_handshake=on_handshake)


def public_port(tls: TlsFiles | None, on_handshake: Callable[[], None] = lambda: None) -> grpc.ServerCredentials | None:
    """The same for clients without certificates. Raises OSError."""
    if tls is None:
        return None

    def read() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([_pair(tls)])

    return _reloading(Latest(tls, read, tls.load_public), require_client=False, on_handshake=on_handshake)


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials from the current files; a channel keeps those it was made with. Raises OSError."""
    # gRPC would end the process for some files that are no certificate, such as empty ones.
    tls.context(ssl.Purpose.SERVER_AUTH)
    key, certificate = _pair(tls)
    return grpc.ssl_channel_credentials(tls.authority.read_bytes(), key, certificate)


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Role]:
    """The roles in the peer's certificate; empty without one."""
    names = set(auth_context.get("x509_subject_alternative_name", ()))
    return frozenset(role for role in Role if role.dns_name.encode() in names)


def _pair(tls: TlsFiles) -> tuple[bytes, bytes]:
    return tls.key.read_bytes(), tls.certificate.read_bytes()


def _reloading(
    latest: Latest[grpc.ServerCertificateConfiguration], *, require_client: bool, on_handshake: Callable[[], None]
) -> grpc.ServerCredentials:
    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls it before each handshake; None means no change."""
        on_handshake()
        return latest.value if latest.renew() else None

    # The type stubs do not allow None.
    return grpc.dynamic_ssl_server_credentials(latest.value, changed, require_client)  # type: ignore[arg-type]
