"""A trace as spans: one tree, contiguous times, the same figures, and no token."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.telemetry.context import TraceContext
from outrider_controller.router.config import TraceConfig
from outrider_controller.router.observe.spans import write_spans
from outrider_controller.router.observe.tracing import Traces

from tests.unit.router.observe.test_tracing import add_round, begun, request

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def spans_of(exporter: InMemorySpanExporter, *, flags: str = "01", error: str = "") -> dict[str, list[ReadableSpan]]:
    """By name, of a request of three rounds: the second is of a draft worker, the last of what the target looked up."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(TraceConfig())
    what = request(trace_context=TraceContext(PARENT + flags))
    recorder, active = begun(traces, what, now_us=1000)
    recorder.opened(worker.WorkerInfo(role=worker.WORKER_ROLE_TARGET, worker_id="t1"), 1000)
    recorder.opened(worker.WorkerInfo(role=worker.WORKER_ROLE_DRAFT, worker_id="d1"), 1000)
    add_round(recorder, active, [20], 2000, prefill_us=300, queue_us=100)
    recorder.lost(worker.WorkerInfo(role=worker.WORKER_ROLE_DRAFT, worker_id="d1"), "draft_lost", 2100)
    add_round(recorder, active, [21, 22], 2500, num_drafted=3, num_verified=2, num_accepted=1, wait_us=50, queue_us=60)
    finish = sequence.FINISH_REASON_UNSPECIFIED if error else sequence.FINISH_REASON_STOP
    looked_up = [sequence.SourceTokens(source="ngram", own=True, num_drafted=4, draft_us=3)]
    add_round(recorder, active, [23], 3000, finish_reason=finish, num_drafted=4, sources=looked_up)
    traces.end(recorder, error, 3100)
    (ended,) = traces.find("r", 0)
    write_spans(provider.get_tracer("test"), ended, what)
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    return by_name


def relative_us(span: ReadableSpan, origin: ReadableSpan) -> tuple[int, int]:
    assert span.start_time and span.end_time and origin.start_time
    return (span.start_time - origin.start_time) // 1000, (span.end_time - origin.start_time) // 1000


def test_queue_prefill_and_rounds_follow_one_another_below_the_request(exporter: InMemorySpanExporter) -> None:
    spans = spans_of(exporter)
    (route,) = spans["route m"]
    assert route.parent is not None and route.parent.span_id == 0x00F067AA0BA902B7
    assert relative_us(route, route) == (0, 2100)
    children = [*spans["queue"], *spans["prefill"], *spans["round"]]
    assert all(span.parent and route.context and span.parent.span_id == route.context.span_id for span in children)
    assert {span.context.trace_id for span in (route, *children) if span.context} == {
        0x4BF92F3577B34DA6A3CE929D0E0E4736
    }
    # The first step took 7 and the parts of the prompt before it 300.
    assert [relative_us(span, route) for span in children] == [(0, 693), (693, 1000), (1000, 1500), (1500, 2000)]


def test_below_a_round_its_target_and_its_draft_are_named(exporter: InMemorySpanExporter) -> None:
    spans = spans_of(exporter)
    (route,), rounds = spans["route m"], [*spans["prefill"], *spans["round"]]
    parents = [span.parent.span_id for span in spans["verify"] if span.parent]
    assert parents == [one.context.span_id for one in rounds if one.context]
    # Every step took 7.
    assert [relative_us(span, route) for span in spans["verify"]] == [(993, 1000), (1493, 1500), (1993, 2000)]
    assert {(span.attributes or {})["outrider.worker"] for span in spans["verify"]} == {"t1"}
    (draft,) = spans["draft"]
    assert draft.parent is not None and draft.parent.span_id == parents[1]
    assert (draft.attributes or {})["outrider.worker"] == "d1"


def test_the_figures_are_those_of_the_trace(exporter: InMemorySpanExporter) -> None:
    spans = spans_of(exporter)
    attributes = spans["route m"][0].attributes or {}
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "m"
    assert attributes["gen_ai.response.id"] == "r"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 4)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert (attributes["outrider.accepted_tokens"], attributes["outrider.verified_tokens"]) == (1, 2)
    assert (attributes["outrider.speculation"], attributes["outrider.verification_mode"]) == ("on", "coupled")
    one = spans["round"][0].attributes or {}
    assert (one["outrider.round.index"], one["outrider.round.position"], one["outrider.round.tokens"]) == (1, 4, 2)
    assert (one["outrider.round.drafted"], one["outrider.round.verified"], one["outrider.round.accepted"]) == (3, 2, 1)
    assert one["outrider.round.wait_seconds"] == pytest.approx(50e-6)
    assert one["outrider.round.queue_seconds"] == pytest.approx(10e-6)
    assert one["outrider.round.verify_seconds"] == pytest.approx(7e-6)


def test_what_happened_in_between_is_an_event_and_an_error_a_status(exporter: InMemorySpanExporter) -> None:
    spans = spans_of(exporter, error="DEADLINE_EXCEEDED")
    (route,) = spans["route m"]
    *_, event = route.events
    assert event.name == "outrider.draft.lost"
    assert dict(event.attributes or {}) == {
        "outrider.worker": "d1",
        "outrider.position": 4,
        "outrider.reason": "draft_lost",
    }
    assert route.status.status_code is StatusCode.ERROR
    assert (route.attributes or {})["error.type"] == "DEADLINE_EXCEEDED"


def test_no_token_and_no_text_is_recorded(exporter: InMemorySpanExporter) -> None:
    spans_of(exporter)
    for span in exporter.get_finished_spans():
        for name, value in (span.attributes or {}).items():
            assert "token_id" not in name and "prompt" not in name
            assert not (isinstance(value, tuple) and value and isinstance(value[0], int))


def test_what_the_caller_does_not_sample_makes_no_spans(exporter: InMemorySpanExporter) -> None:
    assert spans_of(exporter, flags="00") == {}
