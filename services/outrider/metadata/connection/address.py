"""Connects to Redis by a URL: one server over TCP, TLS or a socket, or the master that Sentinels report.

redis://USER@HOST:6379?password_file=FILE       rediss://HOST:6379?ssl_ca_certs=FILE      unix:///FILE
redis+sentinel://USER@HOST:26379,HOST:26379/SERVICE?password_file=FILE    rediss+sentinel://...
    with sentinel_user=USER&sentinel_password_file=FILE if the Sentinels need a password too
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

_SENTINEL = "+sentinel"
_SENTINEL_PORT = 26379
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True, slots=True)
class PasswordFile(CredentialProvider):
    """Reads the file at each connection, so that a new password needs no restart."""

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
    """Connects when first used. `settings`: for each connection. Raises ValueError for an invalid URL, without
    quoting it, because it may contain a password."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError("not a known scheme")
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
    # This pool waits for a free connection; callers have their own timeouts.
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
    # Sentinels use TLS too, as they are on the same network.
    secure: dict[str, Any] = {"ssl": True, **options} if scheme.startswith("rediss") else {}
    timeout = {"socket_connect_timeout": given.get("socket_connect_timeout")}
    # These two classes have no types.
    make: Any = Sentinel
    settings = {"retry": given.get("retry"), **timeout, **secure, **asking}
    sentinels = _Sentinels([make([_host(one)], sentinel_kwargs=settings) for one in hosts.split(",")])
    make = SentinelConnectionPool
    pool: ConnectionPool = make(service, sentinels, db=int(database or 0), **secure, **given)
    return pool


@dataclass(frozen=True, slots=True)
class _Sentinels:
    """Asks all at once. The client would ask one after the other, and one that is silent would take all the time."""

    each: Sequence[Any]

    async def discover_master(self, service: str) -> tuple[str, int]:
        """Raises what the last one to answer raises, if none names a master."""
        asked = [asyncio.create_task(one.discover_master(service)) for one in self.each]
        why: Exception = MasterNotFoundError(service)
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    found: tuple[str, int] = await answer
                    return found
                except (RedisError, OSError) as error:
                    why = error
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise why


def _sentinel_login(options: dict[str, str]) -> dict[str, Any]:
    """Removes the Sentinels' login from the options. Sentinels have other users than the servers."""
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
