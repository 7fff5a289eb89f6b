"""Our metrics under the names in vLLM's dashboards. As in vLLM, one kind of process reports each of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM_NAMES = {
    "outrider_num_requests_running": "vllm:num_requests_running",
    "outrider_num_requests_waiting": "vllm:num_requests_waiting",
    "outrider_gateway_requests_waiting": "vllm:num_requests_waiting",
    "outrider_kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "outrider_prefix_cache_queries": "vllm:prefix_cache_queries",
    "outrider_prefix_cache_hits": "vllm:prefix_cache_hits",
    "outrider_prompt_tokens": "vllm:prompt_tokens",
    "outrider_generation_tokens": "vllm:generation_tokens",
    "outrider_cache_config_info": "vllm:cache_config_info",
    "outrider_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "outrider_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "outrider_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "outrider_spec_decode_num_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
    "outrider_request_success": "vllm:request_success",
    "outrider_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "outrider_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "outrider_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "outrider_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "outrider_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "outrider_request_prompt_tokens": "vllm:request_prompt_tokens",
    "outrider_request_generation_tokens": "vllm:request_generation_tokens",
}
"""vLLM's names by our family's name, without the suffixes of single series."""


class VllmNames(Collector):
    """Reports those metrics of a collector that vLLM has too, under vLLM's names."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            if name := VLLM_NAMES.get(metric.name):
                renamed = Metric(name, metric.documentation, metric.type)
                renamed.samples = [_renamed(sample, metric.name, name) for sample in metric.samples]
                yield renamed


def _renamed(sample: Sample, ours: str, theirs: str) -> Sample:
    return sample._replace(name=theirs + sample.name.removeprefix(ours))
