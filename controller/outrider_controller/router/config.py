"""Everything a router can be told. Parsed once by the process that starts it, handed down in parts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.address import check_advertised
from outrider.metadata import MetadataStore
from outrider.protocol.limits import (
    MAX_ALTERNATIVES,
    MAX_DRAFT_TOKENS,
    MAX_RUN_AHEAD_TOKENS,
    MAX_STREAM_BYTES,
    MAX_WAIT_US,
)
from outrider.rpc.certificates import TlsFiles, check_plain, cluster_tls
from outrider.rpc.roles import ClusterSecret, Role
from outrider.telemetry.logging import LOG_FORMATS
from outrider.telemetry.ops import ANY_LOOPBACK_PORT

_MIN_SALT_KEY_BYTES = 16


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name}: must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Speculation when neither the client nor an operator says otherwise."""

    max_draft_tokens: int = 5
    """Most drafted tokens per step. 0 turns speculation off."""
    max_wait_us: int = 50_000
    """Longest the target may hold a sequence back for a draft, however much it promises."""
    run_ahead_tokens: int = 8
    """Most tokens a draft may guess beyond what it has sent, while that is judged: fewer where it has less time."""
    num_alternatives: int = 5
    """Outcomes of the step under way for which a draft may prepare what follows, where rounds are faster with that."""
    rounds_per_turn: int = 8
    """Rounds with and without such preparations take turns to show which are faster."""
    silent_commits: int = 2
    """Times that a target may wait for a draft in vain before it stops waiting for it."""

    def __post_init__(self) -> None:
        bounds = {
            "max_draft_tokens": MAX_DRAFT_TOKENS,
            "max_wait_us": MAX_WAIT_US,
            "run_ahead_tokens": MAX_RUN_AHEAD_TOKENS,
            "num_alternatives": MAX_ALTERNATIVES,
        }
        for name, bound in bounds.items():
            if not 0 <= getattr(self, name) <= bound:
                raise ValueError(f"policy.{name}: must be in 0..{bound}, got {getattr(self, name)}")
        _positive("policy", silent_commits=self.silent_commits, rounds_per_turn=self.rounds_per_turn)


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
    """A target whose connection to a draft broke, or could not be made, is not given that draft for so long. Doubled
    each time that it happens again, up to a minute."""
    wait_for_target_s: float = 10.0
    """Longest a new request waits for a live target to appear."""
    wait_to_resume_s: float = 30.0
    """The same for one that a target had taken up: its client is reading the answer already. As long as a gateway waits
    for a router that does the same."""
    stall_after_s: float = 1.0
    """Silence on a stream with open sequences before the worker's health is asked."""
    probe_timeout_s: float = 1.0
    max_failed_probes: int = 2
    """Consecutive health checks without a good answer before the stream is given up."""
    max_silence_s: float = 120.0
    """Silence on a stream with open sequences after which it is given up however healthy the worker says it is."""

    def __post_init__(self) -> None:
        _positive(
            "failover",
            max_target_failures=self.max_target_failures,
            max_lost_connections=self.max_lost_connections,
            wait_for_target_s=self.wait_for_target_s,
            wait_to_resume_s=self.wait_to_resume_s,
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
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    max_message_bytes: int = MAX_STREAM_BYTES

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
    """Longest that a request waits for one."""
    retry_after_s: float = 1.0
    """Sent with a refusal until the first requests have ended: then it is known how fast places become free."""

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
    """The last so many. 0 remembers none."""
    max_rounds: int = 2048
    """The first so many of each request."""
    max_total_rounds: int = 65_536
    """Of all requests remembered, some half a kilobyte each; the oldest request goes first."""
    record_tokens: bool = False
    """Output tokens and rejected drafts, for whoever may ask this router. The prompt is never recorded."""

    def __post_init__(self) -> None:
        if self.max_requests < 0:
            raise ValueError("traces.max_requests: must not be negative")
        _positive("traces", max_rounds=self.max_rounds, max_total_rounds=self.max_total_rounds)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 lets the system choose."""
    advertise: str = ""
    """HOST:PORT under which gateways reach it; empty takes the bound address."""
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP; empty means none."""
    tls_dir: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt` of a router; empty serves in plain text."""
    insecure: bool = False
    """Serve in plain text also where other machines can reach it."""
    secret: ClusterSecret | None = None
    """With one only gateways of the same cluster may send requests. None: everybody who reaches the port."""
    drain_timeout_s: float = 30.0
    """After the drain began, how long running requests may take."""
    cache_salt_key: bytes = b""
    """Secret from which tenants' cache salts are derived. Routers that share workers must share it."""
    refresh_s: float = 0.5
    """How often the leases are read."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)
    metadata_url: str = ""
    """Where workers are found; empty where whoever runs the router has the store open."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        check_advertised("router.advertise", self.advertise, self.listen)
        check_plain("router.listen", self.listen, self.tls_dir, self.insecure)
        cluster_tls(Role.ROUTER, self.tls_dir)
        _positive("router", refresh_s=self.refresh_s, drain_timeout_s=self.drain_timeout_s)

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.tls_dir)) if self.tls_dir else None


def parse_arguments(arguments: Sequence[str] | None = None) -> RouterConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        # Says what is wrong with the URL; connects to nothing yet.
        MetadataStore.connect(options.metadata)
        return RouterConfig(
            listen=options.listen,
            advertise=options.advertise,
            ops_listen=options.ops_listen,
            metadata_url=options.metadata,
            log_format=options.log_format,
            **shared_options(options),
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


def shared_options(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of RouterConfig that follow from the arguments of `add_shared_arguments`. Raises ValueError or OSError."""
    secret, key = options.cluster_secret_file, options.cache_salt_key_file
    return {
        "tls_dir": options.tls_dir,
        "insecure": options.insecure,
        "secret": ClusterSecret.read(secret) if secret else None,
        "cache_salt_key": _read_salt_key(key) if key else b"",
        "drain_timeout_s": options.drain_timeout,
        "policy": PolicyConfig(
            max_draft_tokens=options.max_draft_tokens,
            max_wait_us=round(options.max_wait_ms * 1000),
            run_ahead_tokens=options.run_ahead_tokens,
            num_alternatives=options.num_alternatives,
        ),
        "admission": AdmissionConfig(max_queued=options.max_queued, queue_timeout_s=options.queue_timeout),
        "traces": TraceConfig(record_tokens=options.trace_tokens),
    }


def _read_salt_key(path: str) -> bytes:
    """The secret behind cache salts. Raises OSError; ValueError for a file that holds too little."""
    key = Path(path).read_bytes().strip()
    if len(key) < _MIN_SALT_KEY_BYTES:
        raise ValueError(f"cache_salt_key_file: {path} holds less than {_MIN_SALT_KEY_BYTES} bytes")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider_controller.router",
        description="Router: carries requests from gateways to targets and drafts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--metadata", required=True, metavar="URL", help="metadata store in which workers are found")
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="gRPC address; port 0 lets the system choose")
    add("--advertise", default="", metavar="HOST:PORT", help="where gateways reach it; the bound one if empty")
    add("--ops-listen", default=ANY_LOOPBACK_PORT, metavar="HOST:PORT", help="health, metrics, options; none if empty")
    add_shared_arguments(parser)
    return parser


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What a router is told, whether it is one of several or alone."""
    add, policy = parser.add_argument, PolicyConfig()
    add("--max-draft-tokens", type=int, default=5, metavar="N", help="drafted tokens per step unless a client says")
    add("--max-wait-ms", type=float, default=50.0, metavar="MS", help="longest a target holds a sequence for a draft")
    add(
        "--run-ahead-tokens",
        type=int,
        default=policy.run_ahead_tokens,
        metavar="N",
        help="most tokens a draft may guess beyond what is being judged; 0 makes it wait for every commit",
    )
    add(
        "--num-alternatives",
        type=int,
        default=policy.num_alternatives,
        metavar="N",
        help="other outcomes of a step for which a draft may prepare what follows, where rounds are faster with that",
    )
    admission = AdmissionConfig()
    add("--max-queued", type=int, default=admission.max_queued, metavar="N", help="requests that may wait for a place")
    add("--queue-timeout", type=float, default=admission.queue_timeout_s, metavar="S", help="longest such a wait")
    add("--cache-salt-key-file", default="", metavar="FILE", help="secret behind tenants' cache salts; drawn if none")
    add("--trace-tokens", action="store_true", help="keep output tokens and rejected drafts in the traces of requests")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="after SIGTERM, time for running requests")
    add("--tls-dir", default="", metavar="DIR", help="has tls.crt, tls.key and ca.crt; plain text if empty")
    add("--insecure", action="store_true", help="plain text also where other machines can reach it")
    add("--cluster-secret-file", default="", metavar="FILE", help="of which this cluster's processes prove to know")
    add("--log-format", default="human", choices=LOG_FORMATS, help="of the lines on stderr")
