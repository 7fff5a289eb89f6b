"""What is remembered of requests: everything but the prompt, within bounds."""

from __future__ import annotations

from typing import Any

from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.speculation import Speculation
from outrider_controller.router.config import TraceConfig
from outrider_controller.router.observe.tracing import Recorder, TraceBatch, Traces
from outrider_controller.router.request.checks import Request
from outrider_controller.router.requests.sequences import ActiveRequest

from tests.unit.router.made_requests import a_request, under_way

SETTING = Speculation(max_draft_tokens=5, max_wait_us=700)
PROMPT = (111, 112, 113)


def request(request_id: str = "r", **fields: Any) -> Request:
    sampled = {
        "params": SamplingParams(temperature=0.5),
        "mode": VerificationMode.COUPLED,
        "max_new_tokens": 1000,
        "choice": router.SPECULATION_MODE_ON,
    }
    return a_request(request_id=request_id, prompt=PROMPT, **sampled, **fields)


def begun(traces: Traces, what: Request, now_us: int = 0) -> tuple[Recorder, ActiveRequest]:
    recorder = traces.start(what, now_us)
    return recorder, under_way(what, recorder, now_us + 40)


def add_round(recorder: Recorder, active: ActiveRequest, token_ids: list[int], now_us: int, **fields: Any) -> None:
    commit = sequence.Commit(base_len=active.state.committed_len, token_ids=token_ids, **fields)
    recorder.round(
        active.apply(commit, step_us=7, now_us=now_us), setting=SETTING, batch=TraceBatch(3, 8), now_us=now_us
    )


def test_a_trace_says_what_every_round_did_and_took() -> None:
    traces = Traces(TraceConfig(record_tokens=True), "router-1")
    recorder, active = begun(traces, request(committed=(9,)), now_us=1000)
    recorder.opened(worker.WorkerInfo(role=worker.WORKER_ROLE_TARGET, worker_id="t1", model="m"), 1040)
    add_round(recorder, active, [20], 1500, num_cached_tokens=2)
    add_round(
        recorder, active, [21, 22], 1900, num_drafted=3, num_verified=2, num_accepted=1, num_dropped=4,
        rejected_token_ids=[30, 31], chances=bytes([200, 100, 50]), queue_us=11, wait_us=5,
        finish_reason=sequence.FINISH_REASON_STOP,
    )  # fmt: skip
    traces.end(recorder, "CANCELLED", 2000)
    (found,) = traces.find("r", 9999)
    assert (found.request_id, found.router_id, found.running, found.error) == ("r", "router-1", False, "")
    assert (found.prompt_tokens, found.resumed_tokens, found.cached_tokens, found.output_tokens) == (3, 1, 2, 3)
    assert (found.placing_us, found.duration_us) == (40, 1000)
    assert found.finish_reason == sequence.FINISH_REASON_STOP
    assert found.metrics.num_accepted_draft_tokens == 1
    first, second = found.rounds
    assert (first.at_us, first.base_len, list(first.token_ids), first.timing.round_us) == (500, 4, [20], 460)
    assert (second.base_len, list(second.token_ids), list(second.rejected_token_ids)) == (5, [21, 22], [30, 31])
    assert (second.num_drafted, second.num_verified, second.num_accepted, second.num_dropped) == (3, 2, 1, 4)
    assert (second.max_draft_tokens, second.max_wait_us) == (5, 700)
    assert (second.batch_sequences, second.batch_tokens, second.chances) == (3, 8, bytes([200, 100, 50]))
    assert (second.timing.wait_us, second.timing.queue_us, second.timing.verify_us) == (5, 11, 7)
    (event,) = found.events
    assert (event.kind, event.worker_id, event.position) == (trace.TRACE_EVENT_KIND_OPENED, "t1", 4)


def test_the_prompt_is_nowhere_in_it() -> None:
    traces = Traces(TraceConfig())
    recorder, active = begun(traces, request())
    add_round(recorder, active, [20], 500)
    traces.end(recorder, "", 600)
    (found,) = traces.find("r", 700)
    assert set(PROMPT).isdisjoint(token for one in found.rounds for token in one.token_ids)
    assert not any(field.name.startswith("prompt") and field.name != "prompt_tokens" for field, _ in found.ListFields())


def test_what_is_exported_is_chosen_and_has_no_tokens_unless_asked() -> None:
    traces = Traces(TraceConfig(record_tokens=True))
    for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "other")):
        recorder, active = begun(traces, request(name, tenant=tenant))
        add_round(recorder, active, [20], 500, num_drafted=1, rejected_token_ids=[30], chances=bytes([99]))
        traces.end(recorder, "", 600)
    found = list(traces.export(trace.ExportTracesRequest(tenant="acme")))
    assert [one.request_id for one in found] == ["a", "b"]
    assert all(not one.token_ids and not one.rejected_token_ids for part in found for one in part.rounds)
    assert [one.chances for part in found for one in part.rounds] == [bytes([99])] * 2
    (chosen,) = traces.export(trace.ExportTracesRequest(request_ids=["c", "unknown"], tokens=True))
    assert list(chosen.rounds[0].token_ids) == [20] and list(chosen.rounds[0].rejected_token_ids) == [30]
    assert not list(traces.export(trace.ExportTracesRequest(model="another")))


def test_tokens_can_be_left_out() -> None:
    traces = Traces(TraceConfig())
    recorder, active = begun(traces, request())
    add_round(recorder, active, [20, 21], 500, num_drafted=2, num_verified=2, num_accepted=1, rejected_token_ids=[5])
    (found,) = traces.find("r", 600)
    assert not found.rounds[0].token_ids and not found.rounds[0].rejected_token_ids
    assert found.rounds[0].num_tokens == 2


def test_a_running_request_is_found_and_says_so() -> None:
    traces = Traces(TraceConfig())
    recorder, active = begun(traces, request())
    add_round(recorder, active, [20], 500)
    (found,) = traces.find("r", 800)
    assert (found.running, found.duration_us, found.output_tokens, len(found.rounds)) == (True, 800, 1, 1)
    add_round(recorder, active, [21], 900)
    assert len(found.rounds) == 1, "what was handed out does not change"


def test_a_request_without_target_leaves_its_reason() -> None:
    traces = Traces(TraceConfig())
    traces.end(traces.start(request(), 0), "NO_TARGET", 5000)
    (found,) = traces.find("r", 0)
    assert (found.error, found.duration_us, len(found.rounds)) == ("NO_TARGET", 5000, 0)


def test_only_the_last_requests_are_remembered() -> None:
    traces = Traces(TraceConfig(max_requests=3))
    for i in range(5):
        traces.end(traces.start(request(f"r{i}"), i), "", i)
    assert [bool(traces.find(f"r{i}", 9)) for i in range(5)] == [False, False, True, True, True]
    assert len(traces) == 3


def test_none_is_remembered_where_none_is_wanted() -> None:
    traces = Traces(TraceConfig(max_requests=0))
    traces.end(traces.start(request(), 0), "", 1)
    assert (traces.find("r", 2), len(traces)) == ([], 0)


def test_rounds_are_bounded_and_what_is_left_out_is_counted() -> None:
    traces = Traces(TraceConfig(max_rounds=10, max_total_rounds=100))
    for i in range(40):
        recorder, active = begun(traces, request(f"r{i}"))
        for now_us in range(25):
            add_round(recorder, active, [20], 100 + now_us)
        traces.end(recorder, "", 1000)
        assert len(traces) == min(i + 1, 10)
    (found,) = traces.find("r39", 0)
    assert (len(found.rounds), found.num_rounds_omitted, found.output_tokens) == (10, 15, 25)
    assert found.metrics.num_steps == 25


def test_a_request_submitted_twice_has_two_traces_in_order() -> None:
    traces = Traces(TraceConfig())
    traces.end(traces.start(request(), 0), "CANCELLED", 1)
    traces.start(request(committed=(5, 6)), 2)
    assert [found.resumed_tokens for found in traces.find("r", 3)] == [0, 2]


def test_after_an_erasure_nothing_of_the_tenants_earlier_requests_is_remembered() -> None:
    traces = Traces(TraceConfig(record_tokens=True))
    ended, other, running, later = (
        begun(traces, request(name, tenant=tenant, consent_unix_us=at_us))
        for name, tenant, at_us in (("r1", "a", 100), ("r2", "b", 100), ("r3", "a", 100), ("r4", "a", 300))
    )
    for recorder, active in (ended, other, running, later):
        add_round(recorder, active, [20], 500)
    for recorder, _ in (ended, other):
        traces.end(recorder, "", 600)
    assert traces.erase("a", 200) == 1
    assert not traces.find("r1", 700) and [round.token_ids for round in traces.find("r2", 700)[0].rounds] == [[20]]
    assert not traces.find("r3", 700)[0].rounds[0].token_ids
    for recorder, _ in (running, later):
        traces.end(recorder, "", 800)
    assert not traces.find("r3", 900) and traces.find("r4", 900)
