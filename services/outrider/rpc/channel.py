"""Channels of clients, and the deadlines of their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from outrider.errors import DeadlineExceeded
from outrider.rpc.access.certificates import Latest, TlsFiles, Version
from outrider.rpc.access.credentials import channel_credentials
from outrider.rpc.access.roles import Role
from outrider.rpc.options import INTERNAL_MESSAGE_BYTES, channel_options

Connect = Callable[[str], grpc.aio.Channel]
"""Makes a channel to HOST:PORT, which connects when first used."""


def create_channel(
    address: str,
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """A channel to HOST:PORT with our limits and keepalive. Connects when first used; close it.

    Plain text without credentials. `server_name`: the name required in the server's certificate; HOST if empty.
    """
    options = channel_options(max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name:
        options.append(("grpc.default_authority", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


class ConnectTo:
    """Makes channels to processes that prove a role, with the files of the time. Raises OSError."""

    def __init__(self, role: Role, tls: TlsFiles) -> None:
        self._role = role
        self._credentials = Latest(tls, partial(channel_credentials, tls), tls.check_renewed)

    def __call__(self, address: str) -> grpc.aio.Channel:
        self._credentials.renew()
        return create_channel(address, credentials=self._credentials.value, server_name=self._role.dns_name)

    @property
    def version(self) -> Version:
        """Of the files that the next channel gets."""
        self._credentials.renew()
        return self._credentials.version


def connect_to(role: Role, tls: TlsFiles | None) -> Connect:
    """Makes channels to processes of this role. With `tls`, they connect only to a process that proves the role.
    Raises OSError when the files cannot be used."""
    return create_channel if tls is None else ConnectTo(role, tls)


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], *, margin_s: float = 0.05) -> float | None:
    """Timeout in seconds for a call made on behalf of this one; None if the caller set none.

    The margin leaves time to answer before the caller's deadline. Raises DeadlineExceeded when no time is left.
    """
    left_s = context.time_remaining()
    # Without a deadline gRPC reports None, or a very long time.
    if left_s is None or left_s > 1e8:
        return None
    if left_s <= margin_s:
        raise DeadlineExceeded("the deadline has passed")
    return left_s - margin_s
