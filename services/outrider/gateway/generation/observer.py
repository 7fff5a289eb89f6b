"""What is recorded of each request: the gateway's metrics and, where requests are traced, an OpenTelemetry span with
attributes of the generative AI conventions. Times are seconds on the process's monotonic clock.

Text and token ids are never recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.gateway.generation.requests import ChatPrompt, Generation
from outrider.gateway.generation.stats import AnswerFinish
from outrider.limits import MAX_MODEL_CHARS
from outrider.rpc.v1 import router_pb2
from outrider.telemetry.context import TraceContext
from outrider.telemetry.tracing import Tracing, context_of, parent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue


@dataclass(slots=True)
class RequestObserver:
    """One answer counts as a request."""

    metrics: GatewayMetrics
    started_s: float
    context: TraceContext
    """To be sent to the router: of the span, or the caller's own where requests are not traced."""
    span: Span | None = None
    model: str = ""
    """Set once the model is known to be served, so that invented names never become labels."""
    num_tokens: int = 0
    last_s: float | None = None
    finished: bool = False
    waiting: bool = False

    def prepared(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self.model, self.waiting = model, True
        self.metrics.waiting.labels(model).inc()
        self.metrics.prompt_tokens.labels(model).observe(prompt_tokens)
        if self.span is not None:
            self.span.set_attributes({"gen_ai.response.id": request_id, "gen_ai.usage.input_tokens": prompt_tokens})

    def opened(self) -> None:
        """To be called when a target has received the request, or the request has ended."""
        if self.waiting:
            self.waiting = False
            self.metrics.waiting.labels(self.model).dec()
            self.metrics.at_targets.labels(self.model).inc()

    def chunk(self, num_tokens: int, finish: AnswerFinish | None, now_s: float) -> None:
        """To be called before each delivery."""
        if num_tokens:
            self.opened()
            self.num_tokens += num_tokens
            if self.last_s is None:
                self.metrics.ttft.labels(self.model).observe(now_s - self.started_s)
            else:
                self.metrics.itl.labels(self.model).observe(now_s - self.last_s)
            self.last_s = now_s
        if finish is not None:
            self._finish(finish, now_s)

    def _finish(self, finish: AnswerFinish, now_s: float) -> None:
        self.finished = True
        self.metrics.succeeded.labels(self.model, finish.reason).inc()
        times = finish.summary
        prefill_ms = max(0.0, times.time_to_first_token_ms - times.queue_time_ms)
        self.metrics.queue_time.labels(self.model).observe(times.queue_time_ms / 1e3)
        self.metrics.prefill_time.labels(self.model).observe(prefill_ms / 1e3)
        self.metrics.decode_time.labels(self.model).observe(times.generation_time_ms / 1e3)
        self.metrics.inference_time.labels(self.model).observe((prefill_ms + times.generation_time_ms) / 1e3)
        self.metrics.cached_tokens.labels(self.model).observe(finish.usage.cached_tokens)
        self.metrics.e2e.labels(self.model).observe(now_s - self.started_s)
        if finish.usage.completion_tokens > 1:
            self.metrics.tpot.labels(self.model).observe(finish.summary.mean_itl_ms / 1e3)
        if self.span is not None:
            self.span.set_attributes(_found(self.model, finish))

    def ended(self) -> None:
        self.metrics.running.dec()
        self.opened()
        if self.model:
            self.metrics.at_targets.labels(self.model).dec()
        if self.num_tokens:
            self.metrics.generation_tokens.labels(self.model).observe(self.num_tokens)


@contextmanager
def observed(
    metrics: GatewayMetrics, tracing: Tracing | None, generation: Generation, context: TraceContext, started_s: float
) -> Iterator[RequestObserver]:
    """Covers the request from its arrival to any end, which is counted once. Its span is a child of the caller's, of
    whose `context` it is."""
    with _spanned(tracing, generation, context) as span:
        observer = RequestObserver(metrics, started_s, context if span is None else context_of(span), span)
        metrics.running.inc()
        try:
            yield observer
        except OutriderError as error:
            if not observer.finished:
                metrics.failed.labels((error.reason or error.code.name).lower()).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if not observer.finished:
                metrics.failed.labels("cancelled").inc()
            raise
        except Exception:
            if not observer.finished:
                metrics.failed.labels("internal").inc()
            raise
        finally:
            observer.ended()


@contextmanager
def _spanned(tracing: Tracing | None, generation: Generation, context: TraceContext) -> Iterator[Span | None]:
    if tracing is None:
        yield None
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
        yield span
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
        "outrider.speculation": _mode(options.speculation),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _mode(speculation: router_pb2.SpeculationMode.ValueType) -> str:
    return router_pb2.SpeculationMode.Name(speculation).removeprefix("SPECULATION_MODE_").lower()


def _found(model: str, finish: AnswerFinish) -> dict[str, AttributeValue]:
    sums = finish.summary.sums
    return {
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
