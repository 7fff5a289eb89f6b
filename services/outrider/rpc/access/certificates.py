"""Certificate files: checks that a process can serve with them, and makes TLS contexts. Independent of gRPC.

A directory has the files of a TLS secret mounted by Kubernetes: `tls.crt` (with its chain), `tls.key`, `ca.crt`. They
may be replaced at any time: each new handshake uses the current ones.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from outrider.address import is_loopback
from outrider.rpc.access.roles import Role

log = logging.getLogger(__name__)

T = TypeVar("T")
Version = tuple[tuple[int, int], ...]
# More than the message flights of any handshake.
_MAX_FLIGHTS = 6
# Seconds after which unusable files are looked at again.
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One process's certificate and key, and the authority by which it verifies its peers.

    A process of the cluster needs all three files. A port for clients without certificates needs no `ca.crt`.
    """

    directory: Path
    role: Role | None = field(default=None, compare=False)
    """Which the files have to prove, also those that replace them. None: any."""

    @property
    def certificate(self) -> Path:
        return self.directory / "tls.crt"

    @property
    def key(self) -> Path:
        return self.directory / "tls.key"

    @property
    def authority(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def version(self) -> Version:
        """Changes when a file is replaced. Raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key, self.authority) if path.exists()]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in found)

    def check(self, role: Role) -> None:
        """Raises ValueError if peers would refuse these files for the role: missing, unfit, expired, another role's."""
        try:
            _check_readable(self.certificate, self.key, self.authority)
            _shake_hands_with_itself(self, role.dns_name)
        except OSError as error:
            raise ValueError(f"{self.directory}: {_reason(error)}") from None

    def check_public(self) -> None:
        """Raises ValueError if certificate or key are missing or do not match."""
        try:
            _check_readable(self.certificate, self.key)
            self.public_context()
        except OSError as error:
            raise ValueError(f"{self.directory}: {_reason(error)}") from None

    def check_renewed(self) -> None:
        """Raises OSError if peers would refuse these files: missing, unfit, expired, another role's."""
        _check_readable(self.certificate, self.key, self.authority)
        _shake_hands_with_itself(self, "" if self.role is None else self.role.dns_name)

    def context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        """For one end of a connection within the cluster, where both ends verify certificates. Raises OSError."""
        context = ssl.create_default_context(purpose, cafile=str(self.authority))
        context.load_cert_chain(self.certificate, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def public_context(self) -> ssl.SSLContext:
        """For a port that serves HTTP/1.1 to clients. Raises OSError."""
        latest = Latest(self, self.load_public)

        def renew(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, asked: ssl.SSLContext) -> None:
            """Called in each handshake."""
            latest.renew()
            connection.context = latest.value

        listening = self.load_public()
        listening.sni_callback = renew
        return listening

    def load_public(self) -> ssl.SSLContext:
        """With the files as they are now. Raises OSError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols(["http/1.1"])
        return context


class Latest(Generic[T]):
    """What was made of the files when they were last usable: they may be replaced at any time, by unusable ones too."""

    def __init__(self, tls: TlsFiles, make: Callable[[], T], check: Callable[[], object] = lambda: None) -> None:
        """Both raise OSError for unusable files. `check`: of files that replace others."""
        self._tls, self._make, self._check = tls, make, check
        self._refused: Version = ()
        self._again_s, self._problem = 0.0, ""
        try:
            self.version, self.value = tls.version, make()
        except ssl.SSLError as error:
            raise OSError(f"{tls.directory}: {_reason(error)}") from None

    def renew(self) -> bool:
        """Whether usable files have replaced the last ones. Logs once why others are not used."""
        now: Version = ()
        try:
            now = self._tls.version
            # Refused ones are looked at again: a certificate may be valid only in a moment.
            if now == self.version or (now == self._refused and time.monotonic() < self._again_s):
                return False
            self._check()
            value = self._make()
            if self._tls.version != now:
                # One was replaced in between. The next connection reads them all again.
                return False
        except OSError as error:
            if (problem := _reason(error)) != self._problem:
                log.warning("%s: the files from before stay in use: %s", self._tls.directory, problem)
            self._refused, self._again_s, self._problem = now, time.monotonic() + _AGAIN_S, problem
            return False
        self.version, self.value, self._problem = now, value, ""
        log.info("%s: the replaced files are used for new connections", self._tls.directory)
        return True


def cluster_tls(role: Role, tls_dir: str) -> TlsFiles | None:
    """The files of an option's directory; None if empty. Raises ValueError for files that are not this role's."""
    if not tls_dir:
        return None
    files = TlsFiles(Path(tls_dir))
    try:
        files.check(role)
    except ValueError as error:
        raise ValueError(f"tls_dir: {error}") from None
    return files


def public_tls(public_tls_dir: str) -> TlsFiles | None:
    """The files of an option's directory; None if empty. Raises ValueError for unusable files."""
    if not public_tls_dir:
        return None
    files = TlsFiles(Path(public_tls_dir))
    try:
        files.check_public()
    except ValueError as error:
        raise ValueError(f"public_tls_dir: {error}") from None
    return files


def check_plain(field: str, listen: str, tls_dir: str, insecure: bool, option: str = "tls_dir") -> None:
    """Raises ValueError for a plain-text port that other machines can reach, unless `insecure`."""
    if not (tls_dir or insecure or is_loopback(listen)):
        raise ValueError(
            f"{field}: other machines can reach {listen[:60]!r}: give {option}, or insecure for plain text"
        )


def _check_readable(*paths: Path) -> None:
    """Raises OSError with the file's name, which those of ssl lack."""
    for path in paths:
        path.open("rb").close()


def _shake_hands_with_itself(files: TlsFiles, name: str) -> None:
    """A handshake in memory: if it fails, it fails with every peer. An empty `name` is not verified. Raises
    ssl.SSLError, an OSError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = files.context(ssl.Purpose.SERVER_AUTH)
    trusting.check_hostname = bool(name)
    client = trusting.wrap_bio(to_client, to_server, server_hostname=name or None)
    server = files.context(ssl.Purpose.CLIENT_AUTH).wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server) * (_MAX_FLIGHTS // 2):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason.replace("_", " ").lower() if error.reason else "a file is not in PEM format"
    return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)
