"""Everything that can be set about a gateway, parsed once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


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

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_timeout_s", "max_running", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: has to be above 0")


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
    metadata_url: str | None = None
    """Where routers' leases are found; None when `routers` are given."""
    routers: tuple[str, ...] = ()
    model_paths: dict[str, Path] = field(default_factory=dict)
    """Model name → directory with its tokenizer, where the name alone does not tell."""
    limits: Limits = field(default_factory=Limits)
    failover: Failover = field(default_factory=Failover)
    drain_timeout_s: float = 60.0
    """Longest a drain waits for running requests."""
    log_format: str = "json"

    def __post_init__(self) -> None:
        if not self.routers and not self.metadata_url:
            raise ConfigError("one of --metadata and --router is needed to find the routers")
        for address in (self.listen_grpc, self.listen_http, *self.routers):
            split_address(address)
        if self.drain_timeout_s < 0:
            raise ConfigError("drain_timeout_s: has to be at least 0")


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
            metadata_url=options.metadata,
            routers=tuple(options.router),
            model_paths=dict(_model_path(given) for given in options.model_path),
            limits=Limits(
                max_body_bytes=options.max_body_bytes,
                max_running=options.max_running,
                request_timeout_s=options.request_timeout_s,
            ),
            failover=Failover(window_s=options.failover_window_s),
            drain_timeout_s=options.drain_timeout_s,
            log_format=options.log_format,
        )
    except ConfigError as error:
        parser.error(str(error))


def _model_path(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    if not equals or not name or not Path(path).is_dir():
        raise ConfigError(f"--model-path {given!r} is not NAME=DIRECTORY")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    limits, failover = Limits(), Failover()
    parser = argparse.ArgumentParser(
        prog="python -m outrider.gateway",
        description="Serves the public gRPC API and the OpenAI-compatible HTTP API.",
    )
    add = parser.add_argument
    add("--listen-grpc", default="127.0.0.1:8001", metavar="HOST:PORT", help="public gRPC (default %(default)s)")
    add("--listen-http", default="127.0.0.1:8000", metavar="HOST:PORT", help="HTTP (default %(default)s)")
    add("--metadata", metavar="URL", help="metadata store in which routers hold their leases")
    add("--router", action="append", default=[], metavar="HOST:PORT", help="a router; may be given several times")
    add("--model-path", action="append", default=[], metavar="NAME=DIRECTORY", help="where a model's tokenizer is")
    add("--max-body-bytes", type=int, default=limits.max_body_bytes, metavar="N", help="default %(default)s")
    add("--max-running", type=int, default=limits.max_running, metavar="N", help="requests at once (%(default)s)")
    add("--request-timeout-s", type=float, default=limits.request_timeout_s, metavar="S", help="default %(default)s")
    add(
        "--failover-window-s",
        type=float,
        default=failover.window_s,
        metavar="S",
        help="longest wait for a token while routers fail (default %(default)s)",
    )
    add("--drain-timeout-s", type=float, default=60.0, metavar="S", help="default %(default)s")
    add("--log-format", choices=("json", "human"), default="json", help="default %(default)s")
    return parser
