"""Everything that can be set about a gateway, parsed once."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.address import check_address, check_listen, is_loopback
from outrider.configuration import NO_OPTION, ConfigError, Nested, Option, load
from outrider.gateway.tokenizer.model import Parsers
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.process_config import ProcessConfig
from outrider.protocol.receipts import ReceiptKey
from outrider.rpc.access.certificates import TlsFiles, check_plain, public_tls
from outrider.rpc.access.roles import ClusterSecret, Role

_LEAVING_S = 5.0
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
"""As browsers send it: in small letters, without a path (RFC 6454, 6.2)."""
_AGE = 0.3
_REASONING = {"think": True, "none": False}


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one client may ask of us. Each is refused by name when exceeded."""

    max_body_bytes: int = 4 << 20
    """Most bytes of an HTTP request, and of a gRPC message."""
    max_unread_bytes: int = 256 << 20
    """Most bytes of all requests that have not arrived whole, over HTTP and gRPC together. Above it, those are given up
    that take longest to arrive. At least eight times max_body_bytes, so that some can arrive at all."""
    body_timeout_s: float = 30.0
    """Seconds for the whole of an HTTP request body, or of a gRPC message, to arrive."""
    max_running: int = 1024
    """Most requests at once."""
    request_timeout_s: float = 600.0
    """Longest time of a request, in seconds. A client's deadline can only shorten it."""
    max_connections: int = 4096
    """Connections open at once on each of the two ports; fewer where the process may not open as many files."""
    max_streams: int = 1024
    """Most calls at once on one gRPC connection. Further ones wait at the client; they are not refused."""
    header_timeout_s: float = 10.0
    """Seconds for the head of an HTTP request, or a gRPC client's first bytes, to arrive."""
    idle_timeout_s: float = 75.0
    """Seconds that a connection stays open between requests."""
    send_timeout_s: float = 60.0
    """Seconds after which a client that reads nothing of its answer loses the request."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not 0 < getattr(self, limit.name) < math.inf:
                raise ConfigError(f"{limit.name}: has to be above 0, and finite")

    @property
    def max_unread_http_bytes(self) -> int:
        """Counted once; a body in parts lies in memory up to twice."""
        return self._unread_bytes // 4

    @property
    def _unread_bytes(self) -> int:
        return max(self.max_unread_bytes, 8 * self.max_body_bytes)

    @property
    def grpc_places(self) -> int:
        """Messages of gRPC that may arrive at once. A server reads up to twice the limit of each."""
        return self._unread_bytes // 2 // (2 * self.max_body_bytes)


class UnknownFields(enum.StrEnum):
    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What the HTTP API does for the sake of certain clients."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the HTTP API, such as https://chat.example.com; `*`: all. Empty: none."""
    unknown_fields: UnknownFields = UnknownFields.REFUSE
    """Unknown fields of HTTP requests. refuse: an error that names the field. ignore: the answer's header
    x-outrider-ignored names them; options that are known and not served stay errors."""

    api_metrics: bool = False
    """Serve `/metrics` on the port of the HTTP API too, without a key, as if this gateway were one engine of vLLM: for
    pickers of endpoints and dashboards that look there."""

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins: {origin!r} is not an origin, such as https://host or http://host:3000"
                )


@dataclass(frozen=True, slots=True)
class Failover:
    """How a request goes on when its router breaks."""

    window_s: float = 30.0
    """Seconds for which a request is retried while no router accepts it."""
    max_moves: Annotated[int, NO_OPTION] = 8
    """Most routers that may fail during one request. After that the request fails, because it may be the cause."""
    first_pause_s: Annotated[float, NO_OPTION] = 0.05
    """Seconds before the second attempt to reach a router; doubled each time."""
    longest_pause_s: Annotated[float, NO_OPTION] = 1.0
    """Most seconds between two attempts."""
    wait_for_restart_s: float = 300.0
    """Seconds for which the gateway stays ready after the last target of a model has gone. Set the routers' option of
    this name to the same. Without a router the gateway stays ready for `failover_window`."""

    def __post_init__(self) -> None:
        if self.wait_for_restart_s < 0 or self.window_s <= 0:
            raise ConfigError("failover: window_s has to be above 0, wait_for_restart_s at least 0")


@dataclass(frozen=True, slots=True)
class GatewayConfig(ProcessConfig):
    listen_grpc: str = "127.0.0.1:8001"
    """HOST:PORT of the public gRPC API; port 0 lets the system choose. `advertise` is about this port."""
    listen_http: str = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI-compatible HTTP API; port 0 lets the system choose."""
    routers: Annotated[tuple[str, ...], Option("router")] = ()
    """HOST:PORT of each router. Empty: those with a lease in the metadata store."""
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    http: HttpOptions = field(default_factory=HttpOptions)
    failover: Annotated[Failover, Nested("failover_")] = field(default_factory=Failover)
    public_tls_dir: str = ""
    """Directory with `tls.crt` and `tls.key` of the two public ports. Empty: plain text."""
    insecure: bool = False
    """Allow plain text on public ports that other machines can reach."""
    secret: Annotated[ClusterSecret | None, Option("cluster_secret_file", read=ClusterSecret.read, secret=True)] = None
    """File with the secret of the cluster, by which routers recognise its gateways."""
    require_api_keys: bool = False
    """Require an API key even before the first key exists, and where the metadata store has lost its data."""
    keys_required_file: str = ""
    """File that is made once an API key exists: while it is there, a key is required, whatever the metadata store has
    lost. Empty: this process alone remembers it."""
    receipt_key: Annotated[ReceiptKey | None, Option("receipt_key_file", read=ReceiptKey.read, secret=True)] = None
    """A PEM file with the Ed25519 key that signs receipts; gateways of one cluster share it. Without it, each makes a
    key when it starts, and forgets it when it ends."""
    tool_call_parsers: Annotated[tuple[str, ...], Option("tool_call_parser")] = ()
    """How a model writes tool calls, if its chat template does not show it: `FORMAT` or `MODEL=FORMAT`. The page of the
    HTTP API lists the formats."""
    reasoning_parsers: Annotated[tuple[str, ...], Option("reasoning_parser")] = ()
    """Whether a model reasons between <think> and </think>, if its chat template does not show it: `think`, `none`, or
    `MODEL=think`."""
    generation_config: str = "auto"
    """What counts for fields of sampling that a request leaves out. auto: what the model's generation_config.json
    states of temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens. none: the API's own defaults."""
    drain_delay_s: float | None = None
    """Seconds after SIGTERM in which the gateway says that it is not ready but still accepts requests, because load
    balancers go on sending for a while. If above 0, gRPC clients have to reconnect after each 0.3 of it, so that none
    is left at the end. Not given: 5, or 0 if only this machine can reach the public ports."""
    drain_timeout_s: float = 60.0
    """Seconds after SIGTERM in which running requests may finish. Those that are left are then cut off."""

    role: ClassVar[Role] = Role.GATEWAY

    def __post_init__(self) -> None:
        if not self.routers and not self.metadata_url:
            raise ConfigError("one of --metadata and --router is needed to find the routers")
        if self.require_api_keys and not self.metadata_url:
            raise ConfigError("require_api_keys: needs --metadata, where the keys are")
        self.check_process()
        if self.metadata_url:
            self.check_reached("advertise", self.listen_grpc)
        for name in ("listen_grpc", "listen_http"):
            check_listen(name, getattr(self, name))
            check_plain(name, getattr(self, name), self.public_tls_dir, self.insecure, "public_tls_dir")
        public_tls(self.public_tls_dir)
        for name, known in (("tool_call_parsers", FORMATS), ("reasoning_parsers", _REASONING)):
            for given in getattr(self, name):
                if given.rpartition("=")[2] not in known:
                    raise ConfigError(f"{name}: {given!r} does not end in one of {', '.join(known)}")
        if self.generation_config not in ("auto", "none"):
            raise ConfigError(f"generation_config: {self.generation_config!r} is not auto or none")
        if not 0 <= self.leaving_s < math.inf:
            raise ConfigError(f"drain_delay_s: must be at least 0, and finite, got {self.leaving_s:g}")
        for address in self.routers:
            check_address("routers", address)

    @property
    def leaving_s(self) -> float:
        """`drain_delay_s`, or its default: 0 if only this machine reaches the ports, as then no load balancer sends."""
        if self.drain_delay_s is not None:
            return self.drain_delay_s
        return 0.0 if is_loopback(self.listen_grpc) and is_loopback(self.listen_http) else _LEAVING_S

    @property
    def connection_age_s(self) -> float:
        """Maximum age of gRPC connections, so that those opened early in the drain delay end before the server does."""
        return _AGE * self.leaving_s or math.inf

    def parsers(self, model: str) -> Parsers:
        """The settings for this model; they take precedence over those for all models."""
        reasoning = _named(self.reasoning_parsers, model)
        return Parsers(_named(self.tool_call_parsers, model), _REASONING[reasoning] if reasoning else None)

    @property
    def public_tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.public_tls_dir)) if self.public_tls_dir else None


def _named(given: Sequence[str], model: str) -> str:
    """The value of the `[MODEL=]VALUE` that applies to this model; empty without one."""
    values = {name: value for name, _, value in (each.rpartition("=") for each in given)}
    return values.get(model, values.get("", ""))


def parse_arguments(arguments: Sequence[str] | None = None) -> GatewayConfig:
    """From file, environment and command line. An invalid option ends the process with a message that names it."""
    about = "Gateway: the public gRPC API and the OpenAI-compatible HTTP API."
    return load(GatewayConfig, "outrider.gateway", about, arguments)
