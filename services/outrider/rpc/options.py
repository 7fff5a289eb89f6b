"""Limits and keepalive of every connection, in one place: the two ends have to agree.

Connections are pinged every 30 s, also without calls: a dead peer is noticed, and load balancers keep them open.
A C-core server by default allows one ping without data in 300 s and drops the client after three, in the middle of a
long prefill; ours allows one in 10 s. An option that gRPC does not know is ignored without a word: `tests/unit/rpc`
has a server that would show it.
"""

from __future__ import annotations

import math

INTERNAL_MESSAGE_BYTES = 32 << 20
"""Between our own processes: an opening carries a whole prompt, and one message many openings."""

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

_MAX_INT = 2**31 - 1
Options = list[tuple[str, str | int]]


def server_options(max_message_bytes: int) -> Options:
    return [
        # What is above it is refused by `ErrorInterceptor`, which counts it: of what gRPC refuses nobody hears.
        *_message_sizes(2 * max_message_bytes, max_message_bytes),
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A second server on a taken port has to fail, not to share it.
        ("grpc.so_reuseport", 0),
    ]


def public_options(
    *, max_connections: int, max_streams: int, first_bytes_s: float, idle_s: float, age_s: float = math.inf
) -> Options:
    """What a server open to everybody has beside `server_options`: one client must not use up what all share.

    After `age_s`, give or take a tenth, a client is told to connect anew (GOAWAY): calls that run go on, and those that
    cross the message are answered. A server that stops says the same, but cancels what crosses it: by then clients have
    to be elsewhere.
    """
    max_pending = min(_MAX_INT, max_connections * max_streams)
    return [
        ("grpc.max_connection_age_ms", _ms(age_s)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(first_bytes_s)),
        ("grpc.max_connection_idle_ms", _ms(idle_s)),
        ("grpc.max_concurrent_streams", max_streams),
        # Otherwise calls that are over still count until they are cleared away, and a client that keeps to the limit is
        # refused with UNAVAILABLE.
        ("grpc.http.overload_protection", 0),
        # Calls that the application has not taken up yet. Beyond this number gRPC cancels any, also innocent ones: as
        # many as can be open. How many run is decided by the application, which says RESOURCE_EXHAUSTED.
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(min(seconds * 1000, _MAX_INT)))


def channel_options(max_message_bytes: int) -> Options:
    return [
        *_message_sizes(max_message_bytes, max_message_bytes),
        *_KEEPALIVE,
        # A worker that comes back is wanted at once, not after the default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Who takes a broken call over is decided by the caller, who knows what was already delivered.
        ("grpc.enable_retries", 0),
    ]


def _message_sizes(received_bytes: int, sent_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", received_bytes),
        ("grpc.max_send_message_length", sent_bytes),
    ]
