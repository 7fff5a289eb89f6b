"""Answer bodies of the OpenAI-compatible endpoints: our chunks in their words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.gateway.stats import Finish, Summary, Usage
from outrider.protocol.rounds import RequestStats
from outrider.rpc.v1 import router_pb2

Json = dict[str, Any]


def usage(counts: Usage) -> Json:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def metrics(summary: Summary) -> Json:
    """Field names as vLLM has them, so that tools which read those read ours."""
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
        "acceptance_histogram": _keyed(sums.acceptance_histogram),
        "acceptance_histogram_by_draft_length": {
            str(drafted): _keyed(steps) for drafted, steps in sums.acceptance_histogram_by_draft_length.items()
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
    }


def _keyed(histogram: dict[int, int]) -> dict[str, int]:
    return {str(accepted): steps for accepted, steps in histogram.items()}


def model(served: router_pb2.ServedModel, created_s: int) -> Json:
    return {
        "id": served.model,
        "object": "model",
        "created": created_s,
        "owned_by": "outrider",
        "max_model_len": served.max_context_len,
    }


class Shape(Protocol):
    """How one endpoint writes an answer: whole, or piece by piece."""

    def whole(self, text: str, finish: Finish) -> Json: ...

    def opening(self) -> list[Json]:
        """What a stream begins with, before any text."""

    def piece(self, text: str, finish: Finish | None) -> Json: ...

    def closing(self, finish: Finish) -> Json:
        """The usage chunk, which has no choice."""


@dataclass(frozen=True, slots=True)
class CompletionShape:
    id: str
    model: str
    created_s: int

    def whole(self, text: str, finish: Finish) -> Json:
        return self._head() | {"choices": [self._choice(text, finish)], "usage": usage(finish.usage)}

    def opening(self) -> list[Json]:
        return []

    def piece(self, text: str, finish: Finish | None) -> Json:
        return self._head() | {"choices": [self._choice(text, finish)]}

    def closing(self, finish: Finish) -> Json:
        return self._head() | {"choices": [], "usage": usage(finish.usage)}

    def _head(self) -> Json:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
        }

    def _choice(self, text: str, finish: Finish | None) -> Json:
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": finish.reason if finish else None,
        }


@dataclass(frozen=True, slots=True)
class ChatShape:
    id: str
    model: str
    created_s: int

    def whole(self, text: str, finish: Finish) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage(finish.usage)}

    def opening(self) -> list[Json]:
        return [self._chunk({"role": "assistant", "content": ""}, None)]

    def piece(self, text: str, finish: Finish | None) -> Json:
        return self._chunk({"content": text} if text else {}, finish)

    def closing(self, finish: Finish) -> Json:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage(finish.usage)}

    def _head(self, kind: str) -> Json:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created_s, "model": self.model}

    def _chunk(self, delta: Json, finish: Finish | None) -> Json:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish.reason if finish else None,
        }
        return self._head("chat.completion.chunk") | {"choices": [choice]}
