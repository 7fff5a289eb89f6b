"""Our metrics under the names in vLLM's dashboards, with its label `engine`.

A page of one process has what that process reports: as in vLLM, one kind of process reports each of them. `EngineNames`
is the page of a gateway that stands for the whole cluster as one engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "outrider_num_requests_running": ("vllm:num_requests_running",),
    "outrider_num_requests_waiting": ("vllm:num_requests_waiting",),
    "outrider_gateway_requests_waiting": ("vllm:num_requests_waiting",),
    # The older name too, which some pickers still read.
    "outrider_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "outrider_num_preemptions": ("vllm:num_preemptions",),
    "outrider_iteration_tokens": ("vllm:iteration_tokens_total",),
    "outrider_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "outrider_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "outrider_prompt_tokens": ("vllm:prompt_tokens",),
    "outrider_generation_tokens": ("vllm:generation_tokens",),
    "outrider_cache_config_info": ("vllm:cache_config_info",),
    "outrider_spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "outrider_spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "outrider_spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "outrider_spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "outrider_request_success": ("vllm:request_success",),
    "outrider_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "outrider_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "outrider_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "outrider_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "outrider_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "outrider_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "outrider_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "outrider_request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "outrider_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    # There the longest of a request's answers. Here each answer is a request.
    "outrider_request_generation_tokens": (
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
    ),
}
"""vLLM's names by our family's name, without the suffixes of single series."""
_ENGINE = {"engine": "0"}


class VllmNames(Collector):
    """Reports those metrics of a collector that vLLM has too, under vLLM's names."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            for name in VLLM_NAMES.get(metric.name, ()):
                yield _renamed(metric, name)


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV caches of all targets of a model."""

    block_size: int
    num_blocks: int
    num_free_blocks: int


# A gateway's histograms by request, and the counters of targets that their sums stand for.
_COUNTED = {
    "outrider_request_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "outrider_request_cached_tokens": ("vllm:prefix_cache_hits",),
    "outrider_request_generation_tokens": ("vllm:generation_tokens",),
}


class EngineNames(VllmNames):
    """What a gateway reports, and what it knows of its targets, as if it were one engine of vLLM."""

    def __init__(self, source: Collector, caches: Mapping[str, Cache]) -> None:
        """`caches`: by model."""
        super().__init__(source)
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        for metric in self._source.collect():
            if metric.name == "outrider_gateway_requests_at_targets":
                yield _renamed(metric, "vllm:num_requests_running")
            for name in _COUNTED.get(metric.name, ()):
                counter = CounterMetricFamily(name, metric.documentation, labels=["model_name", "engine"])
                for sample in metric.samples:
                    if sample.name.endswith("_sum"):
                        counter.add_metric([sample.labels["model_name"], "0"], sample.value)
                yield counter
        yield from self._of_caches()

    def _of_caches(self) -> Iterator[Metric]:
        usage = Metric("vllm:kv_cache_usage_perc", "Part of the KV blocks of all targets in use, 0 to 1.", "gauge")
        shapes = ["model_name", "engine", "block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("vllm:cache_config_info", "Shape of the KV caches.", labels=shapes)
        for model, cache in self._caches.items():
            used = 1 - cache.num_free_blocks / cache.num_blocks
            usage.add_sample(usage.name, {"model_name": model, **_ENGINE}, used)
            config.add_metric([model, "0", str(cache.block_size), str(cache.num_blocks)], 1)
        older = Metric("vllm:gpu_cache_usage_perc", usage.documentation, "gauge")
        older.samples = [sample._replace(name=older.name) for sample in usage.samples]
        yield from (usage, older, config)


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [_sample(sample, metric.name, name) for sample in metric.samples]
    return renamed


def _sample(sample: Sample, ours: str, theirs: str) -> Sample:
    return sample._replace(name=theirs + sample.name.removeprefix(ours), labels={**sample.labels, **_ENGINE})
