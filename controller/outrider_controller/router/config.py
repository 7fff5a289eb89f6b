"""The options of a router. Parsed once by the process that starts it, handed down in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.address import is_loopback
from outrider.configuration import Nested, Option, load
from outrider.process_config import ProcessConfig
from outrider.protocol.limits import (
    MAX_DRAFT_TOKENS,
    MAX_RUN_AHEAD_TOKENS,
    MAX_STREAM_BYTES,
    MAX_WAIT_US,
)
from outrider.rpc.access.roles import ClusterSecret, Role

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
    """Longest, in microseconds, that the target may hold a sequence back for a draft, however much it promises."""
    run_ahead_tokens: int = 8
    """Tokens that a draft may guess beyond what it has sent, while that is verified."""
    silent_commits: int = 2
    """Times that a target may wait for a draft in vain before it stops waiting for it."""

    def __post_init__(self) -> None:
        bounds = {
            "max_draft_tokens": MAX_DRAFT_TOKENS,
            "max_wait_us": MAX_WAIT_US,
            "run_ahead_tokens": MAX_RUN_AHEAD_TOKENS,
        }
        for name, bound in bounds.items():
            if not 0 <= getattr(self, name) <= bound:
                raise ValueError(f"policy.{name}: must be in 0..{bound}, got {getattr(self, name)}")
        _positive("policy", silent_commits=self.silent_commits)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """When a worker counts as lost, and how long a request may look for another."""

    max_target_failures: int = 2
    """Targets that may say they failed with one request before it is taken for the cause and rejected. A target that
    carries it on for a while clears it."""
    max_lost_connections: int = 3
    """The same for targets whose connection broke: they may have died of the request."""
    max_draft_failures: int = 4
    """Drafts one request may lose before it goes on without."""
    draft_backoff_s: float = 1.0
    """Seconds for which a target whose connection to a draft broke, or could not be made, is not given that draft.
    Doubled each time that it happens again, up to a minute."""
    wait_for_target_s: float = 10.0
    """Seconds that a new request waits for a target of a model that none has served of late."""
    wait_for_restart_s: float = 300.0
    """Seconds that a model may take to load when its only target is restarted: so long after the last one went new
    requests wait for the next, and those that it had taken up. A request's own deadline ends it earlier."""
    stall_after_s: float = 1.0
    """Seconds of silence on a stream with open sequences before the worker's health is asked."""
    # With the looks in between, a stopped worker's requests move within 3 s.
    probe_timeout_s: float = 0.6
    """Seconds for a worker to say how it is."""
    max_failed_probes: int = 2
    """Consecutive health checks without a good answer before the stream is given up."""
    max_silence_s: float = 120.0
    """Seconds of silence on a stream with open sequences after which it is given up, however healthy the worker says it
    is."""

    def __post_init__(self) -> None:
        _positive(
            "failover",
            max_target_failures=self.max_target_failures,
            max_lost_connections=self.max_lost_connections,
            wait_for_target_s=self.wait_for_target_s,
            wait_for_restart_s=self.wait_for_restart_s,
            draft_backoff_s=self.draft_backoff_s,
            stall_after_s=self.stall_after_s,
            probe_timeout_s=self.probe_timeout_s,
            max_failed_probes=self.max_failed_probes,
            max_silence_s=self.max_silence_s,
        )


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The connection to one worker."""

    connect_timeout_s: float = 5.0
    """Seconds for a connection to be made."""
    first_backoff_s: float = 0.1
    """Seconds before the second attempt; doubled each time."""
    max_backoff_s: float = 5.0
    """Most seconds between two attempts."""
    max_message_bytes: int = MAX_STREAM_BYTES
    """Largest message that is taken from a worker."""

    def __post_init__(self) -> None:
        _positive(
            "link",
            connect_timeout_s=self.connect_timeout_s,
            first_backoff_s=self.first_backoff_s,
            max_backoff_s=self.max_backoff_s,
            max_message_bytes=self.max_message_bytes,
        )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds on what is accepted. Checked before the first token, never after."""

    max_sessions: int = 1024
    """Requests one router carries at a time, beside those that wait for a place."""
    max_queued: int = 512
    """Requests that may wait for a place at a target. 0: who finds none is refused."""
    queue_timeout_s: float = 10.0
    """Seconds that a request waits for one."""
    retry_after_s: float = 1.0
    """Seconds after which to ask again, sent with a refusal until the first requests have ended: then it is known how
    fast places become free."""

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

    max_requests: int = 1000
    """Traces of the last so many requests are kept; 0 keeps none."""
    max_rounds: int = 2048
    """The first so many rounds of each request are kept."""
    max_total_rounds: int = 65_536
    """Rounds kept of all requests, some half a kilobyte each; the oldest request goes first."""
    record_tokens: Annotated[bool, Option("tokens")] = False
    """Keep output tokens and rejected drafts in the traces of requests, for whoever may ask this router. Prompts are
    never recorded."""

    def __post_init__(self) -> None:
        if self.max_requests < 0:
            raise ValueError("traces.max_requests: must not be negative")
        _positive("traces", max_rounds=self.max_rounds, max_total_rounds=self.max_total_rounds)


def _read_salt_key(path: str) -> bytes:
    """The secret behind cache salts. Raises OSError; ValueError for a file that holds too little."""
    key = Path(path).read_bytes().strip()
    if len(key) < _MIN_SALT_KEY_BYTES:
        raise ValueError(f"{path} holds less than {_MIN_SALT_KEY_BYTES} bytes")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """One router."""

    metadata_url: Annotated[str, Option("metadata", required=True)] = ""
    """Redis URL of the metadata store, in which workers are found."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT for gRPC; port 0 lets the system choose."""
    secret: Annotated[ClusterSecret | None, Option("cluster_secret_file", read=ClusterSecret.read, secret=True)] = None
    """A file with the secret of the cluster. With one, only gateways of the same cluster may send requests; without,
    everybody who reaches the port."""
    cache_salt_key: Annotated[bytes, Option("cache_salt_key_file", read=_read_salt_key, secret=True)] = b""
    """A file with the secret from which tenants' cache salts follow, the same for all routers: they share cached
    prefixes by it. Not given, where only this machine can reach the router: drawn at start."""
    drain_timeout_s: float = 15.0
    """Seconds that running requests may take to end after SIGTERM; then gateways go on with them at another router. New
    requests wait for the next router for a gateway's `failover_window`, where this one is alone: a drain and a start
    have to take less."""
    refresh_s: float = 0.5
    """Seconds between two readings of the leases."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    failover: Annotated[FailoverConfig, Nested("failover_")] = field(default_factory=FailoverConfig)
    link: Annotated[LinkConfig, Nested("link_")] = field(default_factory=LinkConfig)
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
