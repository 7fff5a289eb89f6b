"""The gateway's OpenTelemetry span of one request, with attributes of the generative AI conventions.

Text and token ids are never recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.gateway.generation.requests import ChatPrompt, Generation
from outrider.gateway.generation.stats import AnswerFinish
from outrider.limits import MAX_MODEL_CHARS
from outrider.telemetry.context import TraceContext
from outrider.telemetry.tracing import Tracing, context_of, parent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class RequestSpan:
    """The span of one request. Without tracing it only holds the caller's trace context, to pass it on unchanged."""

    context: TraceContext
    """The context to send to the router."""
    span: Span | None = None

    def prepared(self, request_id: str, prompt_tokens: int) -> None:
        if self.span is not None:
            self.span.set_attributes({"gen_ai.response.id": request_id, "gen_ai.usage.input_tokens": prompt_tokens})

    def finished(self, model: str, finish: AnswerFinish) -> None:
        if self.span is None:
            return
        sums = finish.summary.sums
        self.span.set_attributes(
            {
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [finish.reason],
                "gen_ai.usage.output_tokens": finish.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": finish.usage.cached_tokens,
                "outrider.time_to_first_token_seconds": finish.summary.time_to_first_token_ms / 1e3,
                "outrider.rounds": sums.num_steps,
                "outrider.drafted_tokens": sums.num_draft_tokens,
                "outrider.verified_tokens": sums.num_verified_tokens,
                "outrider.accepted_tokens": sums.num_accepted_draft_tokens,
                "outrider.router_failovers": finish.summary.num_router_failovers,
            }
        )


@contextmanager
def request_span(tracing: Tracing | None, generation: Generation, context: TraceContext) -> Iterator[RequestSpan]:
    """Covers the request from arrival to any end. It is a child of the caller's span if there is one."""
    if tracing is None:
        yield RequestSpan(context)
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    operation = "chat" if isinstance(generation.prompt, ChatPrompt) else "text_completion"
    span = tracing.tracer.start_span(
        f"{operation} {generation.model[:MAX_MODEL_CHARS]}",
        parent_of(context),
        SpanKind.SERVER,
        {"gen_ai.operation.name": operation, "gen_ai.provider.name": "outrider", **_asked(generation)},
    )
    try:
        yield RequestSpan(context_of(span), span)
    except (Exception, asyncio.CancelledError, GeneratorExit) as error:
        kind = error.reason or error.code.name if isinstance(error, OutriderError) else type(error).__name__
        # Without the message, which may quote the client's text.
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, kind))
        raise
    finally:
        span.end()


def _asked(generation: Generation) -> dict[str, str | int | float]:
    options = generation.options
    asked = {
        "gen_ai.request.model": generation.model[:MAX_MODEL_CHARS],
        "gen_ai.request.max_tokens": options.max_tokens,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.top_k": options.top_k or None,
        # An attribute is a signed 64-bit integer.
        "gen_ai.request.seed": options.seed if options.seed is not None and options.seed < 2**63 else None,
        "outrider.speculation": options.speculation.value,
    }
    return {name: value for name, value in asked.items() if value is not None}
