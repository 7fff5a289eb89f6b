"""Where Redis is, from a URL: one server, by TCP, TLS or a socket, or whoever leads among those that Sentinels watch.

redis://USER@HOST:6379?password_file=FILE       rediss://HOST:6379?ssl_ca_certs=FILE      unix:///FILE
redis+sentinel://USER@HOST:26379,HOST:26379/SERVICE?password_file=FILE    rediss+sentinel://...
    with sentinel_user=USER&sentinel_password_file=FILE where Sentinels ask for a password too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.credentials import CredentialProvider

_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True, slots=True)
class PasswordFile(CredentialProvider):
    """Read at each connection: a new password needs no restart."""

    user: str
    path: Path

    def get_credentials(self) -> tuple[str, str] | tuple[str]:
        """Raises OSError."""
        password = self.path.read_text().strip()
        return (self.user, password) if self.user else (password,)

    async def get_credentials_async(self) -> tuple[str, str] | tuple[str]:
        """Raises OSError."""
        return self.get_credentials()


def open_pool(url: str, *, max_connections: int, settings: Mapping[str, Any]) -> ConnectionPool:
    """Connects when first used. `settings`: of each connection. Raises ValueError for a URL that is none, without
    repeating it: it may hold a password."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError("not a scheme that is known")
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    given: dict[str, Any] = dict(settings)
    login = parts.netloc.rpartition("@")[0]
    if path := options.pop("password_file", ""):
        user, colon, _ = login.partition(":")
        if colon:
            raise ValueError("a password beside password_file")
        given["credential_provider"] = PasswordFile(unquote(user), Path(path))
        parts, login = parts._replace(netloc=parts.netloc.rpartition("@")[2]), ""
    if parts.scheme.endswith(_SENTINEL):
        return _sentinel_pool(parts.scheme, parts.netloc, parts.path, options, given)
    # Waits for a connection that is free: callers have a timeout of their own.
    plain = urlunsplit(parts._replace(query=urlencode(options)))
    return BlockingConnectionPool.from_url(plain, max_connections=max_connections, timeout=None, **given)


def _sentinel_pool(
    scheme: str, netloc: str, path: str, options: dict[str, str], given: dict[str, Any]
) -> ConnectionPool:
    login, _, hosts = netloc.rpartition("@")
    asking = _sentinel_login(options)
    service, _, database = path.removeprefix("/").partition("/")
    if not service or (database and not database.isdecimal()) or not options.keys() <= set(_TLS_FILES):
        raise ValueError("a Sentinel URL is redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DATABASE]")
    user, _, password = login.partition(":")
    if login:
        given |= {"username": unquote(user) or None, "password": unquote(password) or None}
    # Of the Sentinels too: they are asked over the same network.
    secure: dict[str, Any] = {"ssl": True, **options} if scheme.startswith("rediss") else {}
    timeout = {"socket_connect_timeout": given.get("socket_connect_timeout")}
    # Neither class has types.
    make: Any = Sentinel
    sentinel = make([_host(one) for one in hosts.split(",")], sentinel_kwargs={**timeout, **secure, **asking})
    make = SentinelConnectionPool
    pool: ConnectionPool = make(service, sentinel, db=int(database or 0), **secure, **given)
    return pool


def _sentinel_login(options: dict[str, str]) -> dict[str, Any]:
    """Taken out of the options. Sentinels have users of their own, apart from the servers'."""
    user, path = options.pop("sentinel_user", ""), options.pop("sentinel_password_file", "")
    if not path:
        if user:
            raise ValueError("sentinel_user needs sentinel_password_file")
        return {}
    return {"credential_provider": PasswordFile(user, Path(path))}


def _host(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(_SENTINEL_PORT)
    if not host or not port.isdecimal():
        raise ValueError("a Sentinel's address is HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
