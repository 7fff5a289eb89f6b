"""The gateway's Prometheus metrics. `observer` adds to them what happens to a request."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.telemetry.metrics import LabelCap

_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 40, 160)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 8)
_E2E_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 600)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.running = Gauge("outrider_gateway_requests_running", "Requests under way.", registry=self.registry)
        self.waiting = Gauge(
            "outrider_gateway_requests_waiting",
            "Requests that no target has been sent yet.",
            ["model_name"],
            registry=self.registry,
        )
        self.at_targets = Gauge(
            "outrider_gateway_requests_at_targets",
            "Requests that a target has been sent.",
            ["model_name"],
            registry=self.registry,
        )
        self.succeeded = self._counter(
            "request_success", "Requests answered to the end.", "model_name", "finished_reason"
        )
        self.failed = self._counter("request_failure", "Requests refused, cut off or cancelled.", "reason")
        self._over_quota = self._counter("quota_rejected", "Requests refused for a quota.", "tenant", "quota")
        self._tenants = LabelCap(100)
        self.failovers = self._counter("gateway_router_failovers", "Calls that moved to another router.", "kind")
        self.prompt_tokens = self._tokens("request_prompt_tokens", "Tokens of a request's prompt.")
        self.cached_tokens = self._tokens("request_cached_tokens", "Prompt tokens found in a prefix cache.")
        self.generation_tokens = self._tokens("request_generation_tokens", "Tokens delivered to a request.")
        self.ttft = self._seconds("time_to_first_token", "Arrival to first token.", _TTFT_BUCKETS_S)
        self.queue_time = self._seconds(
            "request_queue_time", "Wait for a target with room, and there for the first step.", _TTFT_BUCKETS_S
        )
        self.prefill_time = self._seconds(
            "request_prefill_time", "First step of a request to its first token.", _TTFT_BUCKETS_S
        )
        self.decode_time = self._seconds("request_decode_time", "First token to last.", _E2E_BUCKETS_S)
        self.inference_time = self._seconds("request_inference_time", "First step to last token.", _E2E_BUCKETS_S)
        self.itl = self._seconds(
            "inter_token_latency", "Between two deliveries; one may carry several tokens.", _ITL_BUCKETS_S
        )
        self.tpot = self._seconds(
            "request_time_per_output_token", "First token to last, over the tokens after the first.", _ITL_BUCKETS_S
        )
        self.e2e = self._seconds("e2e_request_latency", "Arrival to end.", _E2E_BUCKETS_S)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"outrider_{name}", meaning, labels, registry=self.registry)

    def _tokens(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"outrider_{name}", meaning, ["model_name"], buckets=_TOKEN_BUCKETS, registry=self.registry)

    def _seconds(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"outrider_{name}_seconds", meaning, ["model_name"], buckets=buckets, registry=self.registry)

    def show(self, model: str) -> None:
        """Shows the load of a model that nobody has asked yet: 0."""
        self.waiting.labels(model)
        self.at_targets.labels(model)

    def over_quota(self, tenant: str, quota: str) -> None:
        self._over_quota.labels(self._tenants(tenant), quota).inc()

    def failover(self, *, resumed: bool) -> None:
        self.failovers.labels("ongoing_request" if resumed else "new_request").inc()
