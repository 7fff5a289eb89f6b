"""Limits and keepalive of every connection, in one place because both ends must agree.

Connections are pinged, also without calls, so that a dead peer is noticed and load balancers keep them: by clients,
which are processes of the cluster, each 10 s, and by servers, whose clients may be anywhere, each 30 s. Who does not
answer within 10 s is given up. A busy interpreter answers: gRPC does that without it. By default a C-core server allows
one ping without data in 300 s and drops the client after three, for example in a long prefill; ours allows one in 5 s.
gRPC ignores unknown options silently, so `tests/unit/rpc` tests these with a server.
"""

from __future__ import annotations

import math

INTERNAL_MESSAGE_BYTES = 32 << 20
"""Within the cluster: an opening carries a whole prompt, and one message many openings."""

_KEEPALIVE = (
    # The first is of connections whose peer takes no bytes; the second alone is of a process that has stopped.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_MAX_INT = 2**31 - 1
Options = list[tuple[str, str | int]]


def server_options(max_message_bytes: int, max_connections: int) -> Options:
    return [
        # The others of the process's files are for what it does for those that are connected.
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Twice the limit, so that `ErrorInterceptor` refuses and counts larger messages; gRPC reports its own refusals
        # nowhere.
        *_message_sizes(2 * max_message_bytes, max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        *_KEEPALIVE,
        # Otherwise a fast client may send megabytes of a message that nobody reads. One that is read gets all its room.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Who connects and says nothing, or makes no call any more, holds a file.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        # A second server on a used port must fail instead of sharing it.
        ("grpc.so_reuseport", 0),
    ]


def public_options(
    *, max_connections: int, max_streams: int, first_bytes_s: float, idle_s: float, age_s: float = math.inf
) -> Options:
    """Options of a public server in addition to `server_options`, so that one client cannot use up shared resources.

    After `age_s`, plus or minus a tenth, the server asks a client to reconnect (GOAWAY). Running calls continue, and
    calls that cross the GOAWAY are answered. A server that stops also sends it, but cancels crossing calls, so clients
    must have moved before.
    """
    max_pending = min(_MAX_INT, max_connections * max_streams)
    return [
        ("grpc.max_connection_age_ms", _ms(age_s)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(first_bytes_s)),
        ("grpc.max_connection_idle_ms", _ms(idle_s)),
        ("grpc.max_concurrent_streams", max_streams),
        # Otherwise ended calls count until they are cleaned up, and a client within the limit gets UNAVAILABLE.
        ("grpc.http.overload_protection", 0),
        # Calls that the application has not accepted yet. Above this number gRPC cancels any of them, so it is as large
        # as the number that can be open. The application itself limits running calls, with RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(min(seconds * 1000, _MAX_INT)))


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_message_sizes(max_message_bytes, max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        *_KEEPALIVE,
        # Reconnects soon to a worker that is back; the default is up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # The caller retries a broken call itself, as it knows what was already delivered.
        ("grpc.enable_retries", 0),
        # Processes of a cluster reach each other directly: a proxy in the environment is for what leaves it.
        ("grpc.enable_http_proxy", 0),
    ]


def _message_sizes(received_bytes: int, sent_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", received_bytes),
        ("grpc.max_send_message_length", sent_bytes),
    ]
