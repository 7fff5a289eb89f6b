"""The options of a router. Parsed once by the process that starts it, handed down in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.address import is_loopback
from outrider.configuration import NO_OPTION, Nested, Option, load
from outrider.limits import MAX_DRAFT_TOKENS, MAX_WAIT_US
from outrider.process_config import ProcessConfig
from outrider.rpc.access.roles import ClusterSecret, Role
from outrider.rpc.outbox import MAX_STREAM_BYTES

_MIN_SALT_KEY_BYTES = 16


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name}: must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Speculation when neither the client nor an operator says otherwise."""

    max_draft_tokens: int = 5
    """Most tokens per step that a draft worker drafts. What a target drafts itself is bounded by the price of a row,
    and by the target's own `max_draft_tokens`. 0 turns all speculation off."""
    max_wait_us: int = 50_000
    """Longest wait of a target for a draft, in microseconds, however much the draft may save."""
    silent_commits: Annotated[int, NO_OPTION] = 2
    """Waits without an answer after which a target no longer waits for a draft."""

    def __post_init__(self) -> None:
        for name, bound in {"max_draft_tokens": MAX_DRAFT_TOKENS, "max_wait_us": MAX_WAIT_US}.items():
            if not 0 <= getattr(self, name) <= bound:
                raise ValueError(f"policy.{name}: must be in 0..{bound}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """When a worker counts as lost, and how long a request may look for another."""

    max_target_failures: Annotated[int, NO_OPTION] = 2
    """Targets that may report a failure with the same request, before the request is rejected as the likely cause. A
    target that serves it for a while resets the count."""
    max_lost_connections: Annotated[int, NO_OPTION] = 3
    """The same for targets whose connection was lost: the request may have crashed them."""
    max_draft_failures: Annotated[int, NO_OPTION] = 4
    """Drafts that one request may lose before it continues without."""
    draft_backoff_s: Annotated[float, NO_OPTION] = 1.0
    """Seconds for which a target does not get a draft again, after their connection was lost or could not be made.
    Doubled at each repeat, up to a minute."""
    wait_for_target_s: float = 10.0
    """Seconds that a new request waits for a target, if no target has served its model recently."""
    wait_for_restart_s: float = 300.0
    """Seconds that requests, new and running, wait for the next target after the last target of their model has gone:
    at least as long as the model takes to load. A request's own deadline may end the wait earlier."""
    stall_after_s: Annotated[float, NO_OPTION] = 1.0
    """Seconds of silence on a stream with open sequences before the worker's health is checked."""
    # With the looks in between, a stopped worker's requests move within 3 s.
    probe_timeout_s: Annotated[float, NO_OPTION] = 0.6
    """Seconds in which a worker has to answer a health check."""
    max_failed_probes: Annotated[int, NO_OPTION] = 2
    """Failed health checks in a row after which the stream is closed."""
    max_silence_s: Annotated[float, NO_OPTION] = 120.0
    """Seconds of silence on a stream with open sequences after which it is closed, even if health checks succeed."""

    def __post_init__(self) -> None:
        _positive("failover", wait_for_target_s=self.wait_for_target_s, wait_for_restart_s=self.wait_for_restart_s)


@dataclass(frozen=True, slots=True)
class LinkConfig:
    connect_timeout_s: float = 5.0
    """Seconds to establish a connection."""
    first_backoff_s: float = 0.1
    """Seconds before the second attempt; doubled each time."""
    max_backoff_s: float = 5.0
    """Most seconds between two attempts."""
    max_message_bytes: int = MAX_STREAM_BYTES
    """Largest message that is taken from a worker."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds on what is accepted. Checked before the first token, never after."""

    max_sessions: int = 1024
    """Most requests that one router serves at once, not counting those in its queue."""
    max_queued: int = 512
    """Most requests for one model that wait in the router's queue for a target with room. 0: no queue; a request that
    finds no room is refused."""
    queue_timeout_s: float = 10.0
    """Longest wait in the queue, in seconds."""
    retry_after_s: float = 1.0
    """Seconds in the Retry-After of a refusal, until the router has seen requests end and can estimate the wait."""

    def __post_init__(self) -> None:
        _positive(
            "admission",
            max_sessions=self.max_sessions,
            queue_timeout_s=self.queue_timeout_s,
            retry_after_s=self.retry_after_s,
        )
        if self.max_queued < 0:
            raise ValueError("admission.max_queued: must not be negative")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What is remembered of requests that have ended."""

    max_requests: Annotated[int, NO_OPTION] = 1000
    """Most requests whose traces are kept; the oldest are dropped first. 0: none."""
    max_rounds: Annotated[int, NO_OPTION] = 2048
    """Most rounds that are kept of each request: the first ones."""
    max_total_rounds: Annotated[int, NO_OPTION] = 65_536
    """Most rounds that are kept of all requests together, about half a kilobyte each; the oldest request is dropped
    first."""
    record_tokens: Annotated[bool, Option("tokens")] = False
    """Keep output tokens and rejected drafts in traces. Whoever may call this router can read them. Prompts are never
    recorded."""


def _read_salt_key(path: str) -> bytes:
    """The secret behind cache salts. Raises OSError; ValueError for a file that holds too little."""
    key = Path(path).read_bytes().strip()
    if len(key) < _MIN_SALT_KEY_BYTES:
        raise ValueError(f"{path} holds less than {_MIN_SALT_KEY_BYTES} bytes")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    metadata_url: Annotated[str, Option("metadata", required=True)] = ""
    """Redis URL of the metadata store, in which workers are found."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT for gRPC; port 0 lets the system choose."""
    secret: Annotated[ClusterSecret | None, Option("cluster_secret_file", read=ClusterSecret.read, secret=True)] = None
    """File with the secret of the cluster. With it, only gateways of the same cluster may send requests. Without it,
    anybody who reaches the port may."""
    cache_salt_key: Annotated[bytes, Option("cache_salt_key_file", read=_read_salt_key, secret=True)] = b""
    """File with the secret from which tenants' cache salts are derived. All routers need the same one, so that they
    share cached prefixes. Not given, if only this machine can reach the router: a new secret at each start."""
    drain_timeout_s: float = 15.0
    """Seconds after SIGTERM in which running requests may finish. Gateways then continue the others at another router.
    If this is the only router, requests wait for the next one for a gateway's `failover_window`: drain and restart
    together have to take less."""
    refresh_s: Annotated[float, NO_OPTION] = 0.5
    """Seconds between two reads of the workers' leases."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    failover: Annotated[FailoverConfig, Nested("failover_")] = field(default_factory=FailoverConfig)
    link: Annotated[LinkConfig, NO_OPTION] = field(default_factory=LinkConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    traces: Annotated[TraceConfig, Nested("trace_")] = field(default_factory=TraceConfig)

    role: ClassVar[Role] = Role.ROUTER

    def __post_init__(self) -> None:
        self.check_process()
        self.check_port(self.listen, "router.")
        if not (self.cache_salt_key or is_loopback(self.listen)):
            reason = "needed where other machines can reach the router: all routers share one secret"
            raise ValueError(f"cache_salt_key_file: {reason}")
        _positive("router", refresh_s=self.refresh_s, drain_timeout_s=self.drain_timeout_s)


def parse_arguments(arguments: Sequence[str] | None = None) -> RouterConfig:
    """Of file, environment and command line. An impossible option ends the process with a message that names it."""
    about = "Router: carries requests from gateways to targets and drafts."
    return load(RouterConfig, "outrider_controller.router", about, arguments)
