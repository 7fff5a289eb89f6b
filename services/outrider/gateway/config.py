"""Everything that can be set about a gateway, parsed once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from outrider.address import check_advertised
from outrider.rpc.certificates import TlsFiles, check_plain, cluster_tls, public_tls
from outrider.rpc.roles import ClusterSecret, Role
from outrider.telemetry.ops import ANY_LOOPBACK_PORT


class ConfigError(ValueError):
    """An option that cannot be; names it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of us. Each is refused by name when exceeded."""

    max_body_bytes: int = 4 << 20
    """Of an HTTP request, and of a gRPC message."""
    body_timeout_s: float = 30.0
    """For the whole of an HTTP request body to arrive."""
    max_running: int = 1024
    """Requests under way at once."""
    request_timeout_s: float = 600.0
    """Longest a request may take when the client sets no deadline, or a later one."""
    max_connections: int = 4096
    """Open at once on each of the two ports; fewer where the process may not open as many files."""
    max_streams: int = 128
    """Calls under way at once on one gRPC connection. A client keeps further ones waiting."""
    header_timeout_s: float = 10.0
    """For the head of an HTTP request, or a gRPC client's first bytes, to arrive."""
    idle_timeout_s: float = 75.0
    """How long a connection stays open between requests."""
    send_timeout_s: float = 60.0
    """For a client to take what it has been sent, when it takes nothing."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not 0 < getattr(self, limit.name) < math.inf:
                raise ConfigError(f"{limit.name}: has to be above 0, and finite")


@dataclass(frozen=True, slots=True)
class Failover:
    """How a request goes on when its router breaks."""

    window_s: float = 30.0
    """Longest a request goes without a token from any router before it is given up."""
    max_moves: int = 8
    """Most routers that may break under one request: one that breaks them is not passed on for ever."""
    first_pause_s: float = 0.05
    longest_pause_s: float = 1.0

    def __post_init__(self) -> None:
        if not (self.window_s > 0 and self.max_moves >= 0 and 0 < self.first_pause_s <= self.longest_pause_s):
            raise ConfigError("failover: window_s and the pauses have to be above 0, max_moves at least 0")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    listen_grpc: str
    """HOST:PORT; port 0 takes a free one."""
    listen_http: str
    advertise: str = ""
    """HOST:PORT of public gRPC as others reach it; empty takes the bound address."""
    metadata_url: str | None = None
    """Where routers' leases are found; None when `routers` are given."""
    routers: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    failover: Failover = field(default_factory=Failover)
    tls_dir: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt` of a gateway, for the way to routers; empty: plain text."""
    public_tls_dir: str = ""
    """Directory with `tls.crt` and `tls.key` of the two public ports; empty: plain text."""
    insecure: bool = False
    """Serve the public ports in plain text also where other machines can reach them."""
    secret: ClusterSecret | None = None
    """By which routers know a gateway of their cluster."""
    require_api_keys: bool = False
    """Refuse requests without an API key before the first one is made, too."""
    drain_timeout_s: float = 60.0
    """Longest a drain waits for running requests."""
    log_format: str = "json"
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP; empty means none."""

    def __post_init__(self) -> None:
        if not self.routers and not self.metadata_url:
            raise ConfigError("one of --metadata and --router is needed to find the routers")
        if self.require_api_keys and not self.metadata_url:
            raise ConfigError("--require-api-keys: needs --metadata, where the keys are")
        for address in (self.listen_grpc, self.listen_http, *self.routers):
            split_address(address)
        try:
            self._check_network()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.drain_timeout_s < 0:
            raise ConfigError("drain_timeout_s: has to be at least 0")

    def _check_network(self) -> None:
        if self.metadata_url:
            check_advertised("advertise", self.advertise, self.listen_grpc)
        for name in ("listen_grpc", "listen_http"):
            check_plain(name, getattr(self, name), self.public_tls_dir, self.insecure, "public_tls_dir")
        cluster_tls(Role.GATEWAY, self.tls_dir)
        public_tls(self.public_tls_dir)

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.tls_dir)) if self.tls_dir else None

    @property
    def public_tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.public_tls_dir)) if self.public_tls_dir else None


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT in two. IPv6 hosts stand in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse(arguments: Sequence[str] | None = None) -> GatewayConfig:
    """From the command line; ends the process with a usage message when it makes no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return GatewayConfig(
            listen_grpc=options.listen_grpc,
            listen_http=options.listen_http,
            advertise=options.advertise,
            metadata_url=options.metadata,
            routers=tuple(options.router),
            limits=Limits(**{limit.name: getattr(options, limit.name) for limit in fields(Limits)}),
            failover=Failover(window_s=options.failover_window_s),
            tls_dir=options.tls_dir,
            public_tls_dir=options.public_tls_dir,
            insecure=options.insecure,
            secret=ClusterSecret.read(options.cluster_secret_file) if options.cluster_secret_file else None,
            require_api_keys=options.require_api_keys,
            drain_timeout_s=options.drain_timeout_s,
            log_format=options.log_format,
            ops_listen=options.ops_listen,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


_LIMITS = {
    "max_body_bytes": "of a request (default %(default)s)",
    "body_timeout_s": "for an HTTP request's body to arrive (default %(default)s)",
    "max_running": "requests at once (default %(default)s)",
    "request_timeout_s": "longest that a request may take (default %(default)s)",
    "max_connections": "open at once on each port (default %(default)s, fewer where files are limited)",
    "max_streams": "calls at once on one gRPC connection (default %(default)s)",
    "header_timeout_s": "for the head of a request to arrive (default %(default)s)",
    "idle_timeout_s": "between requests of one connection (default %(default)s)",
    "send_timeout_s": "for a client to take what it is sent (default %(default)s)",
}


def _parser() -> argparse.ArgumentParser:
    limits, failover = Limits(), Failover()
    parser = argparse.ArgumentParser(
        prog="python -m outrider.gateway",
        description="Serves the public gRPC API and the OpenAI-compatible HTTP API.",
    )
    add = parser.add_argument
    add("--listen-grpc", default="127.0.0.1:8001", metavar="HOST:PORT", help="public gRPC (default %(default)s)")
    add("--listen-http", default="127.0.0.1:8000", metavar="HOST:PORT", help="HTTP (default %(default)s)")
    add("--advertise", default="", metavar="HOST:PORT", help="where others reach public gRPC; the bound one if empty")
    add("--metadata", metavar="URL", help="metadata store in which routers hold their leases")
    add("--router", action="append", default=[], metavar="HOST:PORT", help="a router; may be given several times")
    for name, meaning in _LIMITS.items():
        default = getattr(limits, name)
        unit = "N" if isinstance(default, int) else "S"
        add(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar=unit, help=meaning)
    add(
        "--failover-window-s",
        type=float,
        default=failover.window_s,
        metavar="S",
        help="longest wait for a token while routers fail (default %(default)s)",
    )
    add(
        "--tls-dir", default="", metavar="DIR", help="has tls.crt, tls.key and ca.crt, for routers; plain text if empty"
    )
    add("--public-tls-dir", default="", metavar="DIR", help="has tls.crt and tls.key for clients; plain text if empty")
    add("--insecure", action="store_true", help="public ports in plain text also where other machines can reach them")
    add("--cluster-secret-file", default="", metavar="FILE", help="by which routers know a gateway of their cluster")
    add("--require-api-keys", action="store_true", help="refuse requests without a key before one is made, too")
    add("--drain-timeout-s", type=float, default=60.0, metavar="S", help="default %(default)s")
    add(
        "--ops-listen",
        default=ANY_LOOPBACK_PORT,
        metavar="HOST:PORT",
        help="health, metrics, options; none if empty (default %(default)s)",
    )
    add("--log-format", choices=("json", "human"), default="json", help="default %(default)s")
    return parser
