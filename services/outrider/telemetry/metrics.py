"""Prometheus metrics, named as in other inference servers but with the prefix `outrider_`, in base units.

Each group gets its registry as an argument, so that two workers in one process stay separate. Times are differences of
one process's monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
ITERATION_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_POSITIONS = 32
"""Positions of drafted tokens that are counted separately; later ones count as the last."""
# More than the connections of any of our ports at one time.
_MAX_PEERS = 4096
PHASES = ("queue", "verify", "other", "draft")
"""Phases of a round: before its step (with the wait for a draft), the step, and the rest: network and event loops. The
draft's work overlaps with the queue phase or with the step before."""


class RefusedCalls:
    """Counts gRPC calls that are refused because their caller is not allowed or their content is invalid."""

    def __init__(self, registry: CollectorRegistry, services: Sequence[str]) -> None:
        """`services`: full names; calls to others are counted together."""
        names, labels = "Calls refused for their credential, their request or its size.", ["call", "reason"]
        self._services = frozenset(services)
        self._refused = Counter("outrider_refused_calls", names, labels, registry=registry)

    def count(self, method: str, reason: str) -> None:
        _, service, name = method.split("/")
        call = f"{service.rpartition('.')[2]}/{name}" if service in self._services else "other"
        self._refused.labels(call, reason).inc()


class Handshakes:
    """Counts TLS connections to the gRPC port. gRPC reports each that begins, but none that fails."""

    def __init__(self, registry: CollectorRegistry) -> None:
        began, called = "TLS connections that began.", "TLS connections that made a call; the others failed, or wait."
        self._began = Counter("outrider_tls_handshakes", began, registry=registry)
        self._called = Counter("outrider_tls_callers", called, registry=registry)
        self._seen: OrderedDict[str, None] = OrderedDict()

    def began(self) -> None:
        """To be called at each handshake, from any thread."""
        self._began.inc()

    def called(self, peer: str) -> None:
        """To be called at each call, from one thread. `peer`: address and port as gRPC writes them."""
        if peer in self._seen:
            self._seen.move_to_end(peer)
            return
        self._called.inc()
        self._seen[peer] = None
        if len(self._seen) > _MAX_PEERS:
            self._seen.popitem(last=False)


class SpeculationMetrics(Collector):
    """Counts of speculation. Acceptance rate is accepted / verified; mean length is 1 + accepted / drafts.

    Plain integers, converted when scraped: a Counter takes a lock for every addition, and a router has tens of
    thousands of rounds per second. Only one thread may count.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_verified = 0
        self._num_wasted = 0
        self._accepted = [0] * (MAX_POSITIONS + 1)
        """Entry i: drafts with exactly i accepted tokens; in the last entry with i or more."""
        self._num_accepted = 0
        registry.register(self)

    def round(self, num_drafted: int, num_verified: int, num_accepted: int, num_dropped: int = 0) -> None:
        """Counts one sequence's round, with the numbers of its Commit."""
        self._num_wasted += num_drafted - num_accepted + num_dropped
        if num_drafted == 0:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        self._num_verified += num_verified
        self._num_accepted += num_accepted
        self._accepted[min(num_accepted, MAX_POSITIONS)] += 1

    def collect(self) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Steps that verified drafted tokens.", self._num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens taken into a step.", self._num_draft_tokens)
        yield self._counter(
            "spec_decode_num_verified_tokens",
            "Draft tokens verified: up to the first rejected one.",
            self._num_verified,
        )
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", self._num_accepted)
        yield self._counter("wasted_draft_tokens", "Draft tokens that were dropped or not accepted.", self._num_wasted)
        yield self._per_position()

    def _counter(self, name: str, meaning: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(f"outrider_{name}", meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _per_position(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "outrider_spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft, from 0.",
            labels=["model_name", "position"],
        )
        at_least = list(accumulate(reversed(self._accepted)))[::-1]
        counts = at_least[1:]
        # Later positions count as the last, so that the sum is that of all.
        counts[-1] += self._num_accepted - sum(counts)
        for position, count in enumerate(counts):
            family.add_metric([self._model_name, str(position)], count)
        return family


class Durations(Collector):
    """A histogram with one label and STEP_BUCKETS_S that counts without a lock. Only one thread may observe."""

    def __init__(self, registry: CollectorRegistry, name: str, meaning: str, label: str, values: Sequence[str]) -> None:
        self._name, self._meaning, self._label = name, meaning, label
        self._counts = {value: [0] * (len(STEP_BUCKETS_S) + 1) for value in values}
        self._sums_s = dict.fromkeys(values, 0.0)
        registry.register(self)

    def observe(self, value: str, durations_s: Sequence[float]) -> None:
        """Raises KeyError for an unknown label value."""
        counts = self._counts[value]
        for duration_s in durations_s:
            counts[bisect_left(STEP_BUCKETS_S, duration_s)] += 1
        self._sums_s[value] += sum(durations_s)

    def observe_same(self, value: str, duration_s: float, count: int) -> None:
        """Counts one duration `count` times. Raises KeyError for an unknown label value."""
        self._counts[value][bisect_left(STEP_BUCKETS_S, duration_s)] += count
        self._sums_s[value] += count * duration_s

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=[self._label])
        bounds = [*(str(float(bound)) for bound in STEP_BUCKETS_S), "+Inf"]
        for value, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([value], buckets, self._sums_s[value])
        yield family


class WorkerMetrics:
    """The load of a draft or target worker. Drafts have other metric names, as a sequence on both is one request."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        block_size: int = 0,
        num_blocks: int = 0,
        prefix: str = "outrider_",
    ) -> None:
        gauge = partial(_labelled, Gauge, registry, model_name, prefix)
        self._num_blocks = num_blocks
        self._running = gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Sequences waiting for room.")
        self._cache_usage = gauge("kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.")
        self._step = Histogram(
            f"{prefix}step_duration_seconds",
            "One step of the engine.",
            ["model_name"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        ).labels(model_name)
        config = Gauge(
            f"{prefix}cache_config_info",
            "Shape of the KV cache.",
            ["model_name", "block_size", "num_gpu_blocks"],
            registry=registry,
        )
        config.labels(model_name, str(block_size), str(num_blocks)).set(1)

    def load(self, *, num_running: int, num_waiting: int, num_free_blocks: int) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._cache_usage.set(1 - num_free_blocks / self._num_blocks if self._num_blocks else 0)

    def step(self, duration_s: float) -> None:
        self._step.observe(duration_s)


class TokenMetrics:
    """Prompt and output tokens of a target. If a request moves to another target, its prompt counts there again."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        counter = partial(_labelled, Counter, registry, model_name, "outrider_")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of opened sequences.")
        self._generation = counter("generation_tokens", "Tokens committed.")
        self._iteration = Histogram(
            "outrider_iteration_tokens",
            "Tokens in one step: of prompts, the last ones of answers, and drafted ones.",
            ["model_name"],
            buckets=ITERATION_BUCKETS,
            registry=registry,
        ).labels(model_name)

    def opened(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self._prompt.inc(num_prompt_tokens)
        self._queries.inc(num_prompt_tokens)
        self._hits.inc(num_cached_tokens)

    def step(self, num_tokens: int, num_committed: int) -> None:
        self._iteration.observe(num_tokens)
        self._generation.inc(num_committed)


@dataclass(slots=True)
class LabelCap:
    """Keeps the first `limit` values and replaces the rest by "other", because a label's values use memory for ever."""

    limit: int
    _seen: set[str] = field(default_factory=set)

    def __call__(self, value: str) -> str:
        if value not in self._seen and len(self._seen) >= self.limit:
            return "other"
        self._seen.add(value)
        return value


_METADATA_FAULTS = {
    "num_outages": "Times that the metadata store stopped answering.",
    "num_timeouts": "Calls to the metadata store that took too long.",
    "num_refused": "Calls that the metadata store refused.",
    "num_malformed": "Records in the metadata store that could not be read.",
    "num_dropped_events": "Events that were lost because the metadata store did not take them.",
}


class MetadataCollector(Collector):
    """Reads the metadata store's own counters when scraped."""

    def __init__(
        self, registry: CollectorRegistry, available: Callable[[], bool], counts: Callable[[], Mapping[str, int]]
    ):
        self._available = available
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        help_text = "1 while the metadata store answers."
        yield GaugeMetricFamily("outrider_metadata_available", help_text, value=float(self._available()))
        for name, value in self._counts().items():
            yield CounterMetricFamily(f"outrider_metadata_{name}", _METADATA_FAULTS[name], value=value)


M = TypeVar("M", Counter, Gauge)


def _labelled(kind: type[M], registry: CollectorRegistry, model_name: str, prefix: str, name: str, meaning: str) -> M:
    return kind(f"{prefix}{name}", meaning, ["model_name"], registry=registry).labels(model_name)


CounterRow = tuple[str, str, float | Mapping[str, float]]
"""A counter's name without `outrider_`, its meaning, and its value, or its values by `source`."""


class CounterCollector(Collector):
    """Counters of one model's worker, which keeps their values itself: they are read at each scrape."""

    def __init__(self, model_name: str, read: Callable[[], Iterable[CounterRow]]) -> None:
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, meaning, value in self._read():
            source = ["source"] if isinstance(value, Mapping) else []
            family = CounterMetricFamily(f"outrider_{name}", meaning, labels=["model_name", *source])
            # A copy: the step thread may add a source meanwhile.
            values = {(key,): n for key, n in dict(value).items()} if isinstance(value, Mapping) else {(): value}
            for labels, count in values.items():
                family.add_metric([self._model_name, *labels], count)
            yield family
