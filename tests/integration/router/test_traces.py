"""Traces of real requests: what they add up to, who may ask, and spans that arrive at a collector."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from outrider.errors import Code
from outrider.rpc.channel import create_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import trace_pb2_grpc
from outrider_controller.router.config import TraceConfig

from tests.fakes import FakeDraft, FakeTarget
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Answer, Fleet

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def get_traces(fleet: Fleet, request_id: str = "r1") -> list[trace.RequestTrace]:
    assert fleet.router is not None
    async with create_channel(fleet.router.address) as channel:
        request = trace.GetTraceRequest(request_id=request_id)
        return list((await trace_pb2_grpc.TraceServiceStub(channel).GetTrace(request, timeout=5)).traces)


async def ended_trace(fleet: Fleet, request_id: str = "r1") -> trace.RequestTrace:
    """A call ends on the router a moment after its last response has arrived."""
    async with asyncio.timeout(60):
        while (found := (await get_traces(fleet, request_id))[-1]).running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return found


def check_adds_up(found: trace.RequestTrace, answer: Answer, prompt_len: int) -> None:
    """Every token is in one round, positions strictly increase, times are parts of their rounds."""
    assert [token for one in found.rounds for token in one.token_ids] == answer.token_ids
    assert [one.num_accepted for one in found.rounds] == [response.num_accepted for response in answer.rounds]
    assert sum(one.num_accepted + (one.num_tokens - one.num_accepted) for one in found.rounds) == found.output_tokens
    assert found.output_tokens == len(answer.token_ids)
    position = prompt_len + found.resumed_tokens
    for one in found.rounds:
        assert one.base_len == position
        assert one.num_tokens == len(one.token_ids) > 0
        assert one.num_accepted <= one.num_verified <= one.num_drafted
        assert len(one.rejected_token_ids) == one.num_drafted - one.num_accepted
        timing = one.timing
        assert timing.wait_us <= timing.queue_us
        assert timing.compute_us <= timing.draft_us or not timing.draft_us
        position += one.num_tokens
    at_us = [one.at_us for one in found.rounds]
    assert at_us == sorted(at_us) and at_us[-1] <= found.duration_us
    for field, name in {"num_draft_tokens": "num_drafted", "num_accepted_draft_tokens": "num_accepted"}.items():
        assert getattr(found.metrics, field) == sum(getattr(one, name) for one in found.rounds)


async def test_the_rounds_of_a_trace_are_the_rounds_of_the_answer(fleet: Fleet) -> None:
    target = await fleet.target()
    draft = await fleet.draft()
    await fleet.start()
    answer = await fleet.ask(fleet.request(speculation=router.SPECULATION_MODE_ON))
    found = await ended_trace(fleet)
    check_adds_up(found, answer, 3)
    assert fleet.router is not None
    assert (found.router_id, found.tenant, found.prompt_tokens) == (fleet.router.worker_id, "t", 3)
    assert (found.finish_reason, found.error) == (sequence.FINISH_REASON_LENGTH, "")
    assert {event.worker_id for event in found.events} == {target.info.worker_id, draft.info.worker_id}
    speculative = [one for one in found.rounds if one.num_drafted]
    assert all(one.source == "simulated" and one.max_draft_tokens == 5 for one in speculative)
    assert any(one.timing.wire_us for one in speculative)


async def test_parts_of_a_round_are_not_more_than_the_round(fleet: Fleet) -> None:
    """Slow steps and a slow draft: each is found where it belongs."""
    await fleet.target(FakeTarget(step_s=0.02))
    await fleet.draft(FakeDraft(delay_s=0.005, accuracy=0.5))
    await fleet.start()
    await fleet.ask(fleet.request(speculation=router.SPECULATION_MODE_ON))
    # Not the first ones: what is done for the first time in a process takes long.
    rounds = (await ended_trace(fleet)).rounds[6:]
    assert len(rounds) > 8
    parts_us = 0
    for one in rounds:
        timing = one.timing
        assert timing.verify_us == 20_000
        parts_us += timing.queue_us + timing.prefill_us + timing.verify_us
    # On the whole: a commit that comes late makes its own round longer, and the next one shorter.
    assert parts_us <= sum(one.timing.round_us for one in rounds) + 5_000
    drafted = [one.timing for one in rounds if one.num_drafted]
    assert sum(t.draft_us >= t.compute_us >= 5_000 for t in drafted) > len(drafted) / 2


async def test_real_workers_report_what_a_trace_needs(real_fleet: Fleet) -> None:
    prompt = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
    request = real_fleet.request(prompt, 60, model="tiny", speculation=router.SPECULATION_MODE_ON)
    answer = await real_fleet.ask_until_drafted(request)
    found = await ended_trace(real_fleet)
    check_adds_up(found, answer, len(prompt))
    drafted = [one for one in found.rounds if one.num_drafted]
    assert sum(one.timing.compute_us > 0 for one in drafted) > len(drafted) / 2
    assert all(one.timing.draft_us > 0 for one in drafted) and any(one.timing.wire_us > 0 for one in drafted)
    assert any(one.timing.wait_us for one in found.rounds)
    assert all(one.batch_sequences == 1 and one.timing.verify_us for one in found.rounds)
    # What the target says of itself fills its rounds: clocks agree because each measures durations only.
    said_us = sum(t.queue_us + t.prefill_us + t.verify_us for t in (one.timing for one in found.rounds))
    assert said_us <= sum(one.timing.round_us for one in found.rounds) + 1000 * len(found.rounds)


async def test_a_draft_that_dies_is_told_where_it_died(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.01))
    draft = await fleet.draft()
    await fleet.start()
    asking = asyncio.create_task(fleet.ask(fleet.request(max_new_tokens=60)))
    await until(lambda: draft.live)
    await draft.kill()
    answer = await asking
    found = await ended_trace(fleet)
    check_adds_up(found, answer, 3)
    lost, *later = [event for event in found.events if event.kind == trace.TRACE_EVENT_KIND_LOST]
    assert (lost.worker_id, lost.reason) == (draft.info.worker_id, "draft_lost")
    assert 3 <= lost.position <= 63
    # As long as its lease lives it is tried again, now and then.
    assert {event.reason for event in later} <= {"draft_unreachable"}


async def test_a_request_that_moves_says_so_and_goes_on_counting(fleet: Fleet) -> None:
    first, second = await fleet.target(FakeTarget(step_s=0.01)), await fleet.target(FakeTarget(step_s=0.01))
    await fleet.start()
    asking = asyncio.create_task(fleet.ask(fleet.request()))
    await until(lambda: first.num_steps or second.num_steps)
    dying = first if first.num_steps else second
    await dying.kill()
    answer = await asking
    found = await ended_trace(fleet)
    check_adds_up(found, answer, 3)
    assert [event.kind for event in found.events] == [
        trace.TRACE_EVENT_KIND_OPENED, trace.TRACE_EVENT_KIND_LOST, trace.TRACE_EVENT_KIND_OPENED,
    ]  # fmt: skip
    assert found.metrics.num_target_failovers == 1


async def test_a_running_request_can_be_watched_and_a_cancelled_one_is_kept(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.01))
    await fleet.start()
    call = fleet.call(fleet.request(max_new_tokens=4000))
    await call.read()
    (found,) = await get_traces(fleet)
    assert found.running and found.rounds and not found.finish_reason
    call.cancel()
    found = await ended_trace(fleet)
    assert (found.error, found.finish_reason) == ("CANCELLED", 0)


async def test_who_is_unknown_or_forgotten_is_not_found_by_name(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.start(traces=TraceConfig(max_requests=2))
    for i in range(4):
        await fleet.ask(fleet.request(request_id=f"r{i}", max_new_tokens=4))
        await ended_trace(fleet, f"r{i}")
    for gone in ("r0", "r1", "nobody"):
        with pytest.raises(grpc.RpcError) as refused:
            await get_traces(fleet, gone)
        error = from_rpc_error(refused.value)
        assert (error.code, error.reason, error.field) == (Code.NOT_FOUND, "UNKNOWN_REQUEST", "request_id")
        assert gone in error.message and "2 requests" in error.message
    with pytest.raises(grpc.RpcError) as refused:
        await get_traces(fleet, "")
    assert from_rpc_error(refused.value).field == "request_id"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The receiving end of OTLP over gRPC."""

    def __init__(self) -> None:
        self.spans: list[otlp.Span] = []
        self.services: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    servicer, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield servicer
    await server.stop(None)


async def test_the_spans_of_a_request_arrive_at_a_collector(collector: Collector, fleet: Fleet) -> None:
    await fleet.target()
    await fleet.draft()
    await fleet.start()
    await fleet.ask(fleet.request(traceparent=PARENT, tracestate="a=1"))
    found = await ended_trace(fleet)
    assert found.trace_id == PARENT[3:35]
    # The request, its wait, and of each round its own span, the target's and, if it was drafted, the draft's.
    num_spans = 2 + 2 * len(found.rounds) + sum(one.num_drafted > 0 for one in found.rounds)
    await until(lambda: len(collector.spans) == num_spans)
    assert collector.services == {"outrider-router"}
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT[3:35]}
    by_name: dict[str, list[otlp.Span]] = {}
    for span in collector.spans:
        by_name.setdefault(span.name, []).append(span)
    (route,) = by_name["route simulated"]
    assert (route.parent_span_id.hex(), route.trace_state) == (PARENT[36:52], "a=1")
    assert len(by_name["round"]) == len(found.rounds) - 1
    assert len(by_name["queue"]) == len(by_name["prefill"]) == 1
    children = [span for span in collector.spans if span is not route]
    rounds = (*by_name["prefill"], *by_name["round"])
    assert {span.parent_span_id for span in (*by_name["queue"], *rounds)} == {route.span_id}
    assert [span.parent_span_id for span in by_name["verify"]] == [span.span_id for span in rounds]
    assert {span.parent_span_id for span in by_name["draft"]} <= {span.span_id for span in rounds}
    accepted = [
        pair.value.int_value
        for span in (*by_name["prefill"], *sorted(by_name["round"], key=lambda span: span.start_time_unix_nano))
        for pair in span.attributes
        if pair.key == "outrider.round.accepted"
    ]
    assert accepted == [one.num_accepted for one in found.rounds]
    assert all(route.start_time_unix_nano <= span.start_time_unix_nano for span in children)
    assert all(span.end_time_unix_nano <= route.end_time_unix_nano for span in children)


async def test_a_collector_that_is_not_there_disturbs_nobody(monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    await fleet.target()
    await fleet.start()
    answer = await fleet.ask(fleet.request())
    assert len(answer.token_ids) == 40
