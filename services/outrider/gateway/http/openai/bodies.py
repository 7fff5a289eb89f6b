"""Parts of the answer bodies of the OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.gateway.generation.answers import Choices
from outrider.gateway.generation.stats import Summary, Usage
from outrider.protocol.rounds import RequestStats
from outrider.rpc.v1 import router_pb2

Json = dict[str, Any]


def usage(counts: Usage) -> Json:
    details = {
        "accepted_prediction_tokens": counts.accepted_prediction_tokens,
        "rejected_prediction_tokens": counts.rejected_prediction_tokens,
        "reasoning_tokens": counts.reasoning_tokens,
    }
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    } | ({"completion_tokens_details": details} if any(details.values()) else {})


def metrics(choices: Choices) -> Json:
    """The field with the metrics of a single answer that has ended. None for several, as in vLLM, because their times
    overlap."""
    if not choices.answers[0].options.include_metrics or not choices.finishes:
        return {}
    return {"metrics": _metrics(choices.finishes[0].summary) if len(choices.answers) == 1 else None}


def _metrics(summary: Summary) -> Json:
    """Under vLLM's field names, for tools that read those."""
    return {
        "time_to_first_token_ms": summary.time_to_first_token_ms,
        "generation_time_ms": summary.generation_time_ms,
        "queue_time_ms": summary.queue_time_ms,
        "mean_itl_ms": summary.mean_itl_ms,
        "tokens_per_second": summary.tokens_per_second,
        "speculative_decoding": _speculative_decoding(summary.sums, summary.num_router_failovers),
    }


def _speculative_decoding(sums: RequestStats, num_router_failovers: int) -> Json:
    return {
        "mean_acceptance_length": sums.mean_acceptance_length,
        "draft_acceptance_rate": sums.draft_acceptance_rate,
        "acceptance_histogram": _dense(sums.acceptance_histogram, sums.num_spec_tokens),
        "acceptance_histogram_by_draft_length": {
            str(drafted): _dense(steps, drafted) for drafted, steps in sums.acceptance_histogram_by_draft_length.items()
        },
        "num_spec_steps": sums.num_spec_steps,
        "num_accepted_draft_tokens": sums.num_accepted_draft_tokens,
        "num_draft_tokens": sums.num_draft_tokens,
        "num_verified_tokens": sums.num_verified_tokens,
        "num_spec_tokens": sums.num_spec_tokens,
        "num_steps": sums.num_steps,
        "num_dropped_draft_tokens": sums.num_dropped_draft_tokens,
        "num_target_failovers": sums.num_target_failovers,
        "num_revision_changes": sums.num_revision_changes,
        "num_draft_failovers": sums.num_draft_failovers,
        "num_router_failovers": num_router_failovers,
        "num_on_as_auto": sums.num_on_as_auto,
    }


def _dense(histogram: dict[int, int], most: int) -> list[int]:
    """Steps by the number of accepted tokens, 0 to `most`, as vLLM lists them."""
    return [histogram.get(accepted, 0) for accepted in range(most + 1)]


def model(served: router_pb2.ServedModel, created_s: int, sampling_defaults: Mapping[str, float]) -> Json:
    return {
        "id": served.model,
        "object": "model",
        "created": created_s,
        "owned_by": "outrider",
        "max_model_len": served.max_context_len,
        "sampling_defaults": dict(sampling_defaults),
    }
