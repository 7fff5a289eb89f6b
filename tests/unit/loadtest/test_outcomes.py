"""Figures of a load test."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2

from loadtest.faults import Killer, workers_of
from loadtest.outcomes import Outcome, Report, Slo, goodput
from loadtest.settings import Faults, read_profile
from loadtest.table import table
from loadtest.verdict import Happened, failures

ANSWERED = Outcome(
    "chat",
    0.0,
    ttft_ms=100,
    e2e_ms=1000,
    itl_ms=(300, 600),
    prompt_tokens=20,
    cached_tokens=5,
    completion_tokens=10,
    verified_tokens=8,
    accepted_tokens=6,
    drafted_rounds=3,
)
FAILED = Outcome("code", 0.0, error="UNAVAILABLE", e2e_ms=5)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_ms=100, tpot_ms=100, e2e_ms=1000), True),
        (Slo(ttft_ms=99), False),
        (Slo(tpot_ms=99), False),
        (Slo(e2e_ms=999), False),
    ],
)
def test_a_request_meets_the_slo_only_if_it_keeps_every_limit(slo: Slo, met: bool) -> None:
    assert slo.met(ANSWERED) is met


def test_a_failed_request_meets_no_slo() -> None:
    assert not Slo().met(FAILED)
    assert goodput([ANSWERED, FAILED], Slo()) == 0.5


def test_the_report_has_a_row_for_each_tenant_and_one_of_all() -> None:
    report = Report.of([ANSWERED, ANSWERED, FAILED], Slo(ttft_ms=200), 0.0, 2.0)
    chat, code, total = report.rows
    assert (chat["tenant"], chat["requests"], chat["failed"], chat["goodput"]) == ("chat", 2, 0, 1.0)
    assert (chat["tpot_ms_p50"], chat["itl_ms_p50"], chat["tokens_per_s"]) == (100, 450, 10)
    assert (chat["cached"], chat["accepted"], chat["tokens_per_round"]) == (0.25, 0.75, 3.0)
    assert (code["failed"], code["goodput"], code["e2e_ms_p50"]) == (1, 0.0, 0.0)
    assert (code["tokens_per_round"], total["tokens_per_round"]) == (None, 3.0)
    assert (total["requests"], total["requests_per_s"], total["good_requests_per_s"]) == (3, 1.0, 1.0)
    assert report.errors == {"UNAVAILABLE": 1}


def test_the_table_says_what_failed_what_was_killed_and_that_the_client_is_too_busy() -> None:
    report = Report.of([ANSWERED, FAILED], Slo(ttft_ms=200), 0.0, 2.0)
    text = table(report, read_profile("faults"), Happened(60, ["draft d-1"], cpus=[0.93]))
    assert all(part in text for part in ("UNAVAILABLE", "draft d-1", "TTFT <= 200 ms", "93%", "too busy"))
    assert "FAILED: requests failed: 1" in text


def test_a_client_of_several_processes_is_too_busy_when_one_of_them_is() -> None:
    report = Report.of([ANSWERED], Slo(), 0.0, 2.0)
    text = table(report, read_profile("steady"), Happened(60, cpus=[0.6, 0.6]))
    assert "120%" in text and "too busy" not in text


def test_warm_up_is_in_no_figure_but_its_failures_are() -> None:
    late = replace(ANSWERED, sent_s=9.5)
    report = Report.of([ANSWERED, replace(FAILED, sent_s=1.0), late], Slo(), begin_s=5.0, end_s=10.0)
    assert (report.total["requests"], report.total["failed"], report.total["goodput"]) == (2, 1, 0.5)
    # The last answer ends half a second after the load.
    assert report.seconds == 5.5
    assert failures(report, read_profile("steady"), Happened(10)) == ["requests failed: 1"]


@pytest.mark.parametrize(
    ("killed", "reasons"),
    [
        ([], ["killed: 0, not 9", "no draft was killed", "no target was killed", "no router was killed"]),
        (["draft d"], ["killed: 1, not 9", "no target was killed", "no router was killed"]),
        (["draft d", "target t", "router r"] * 2 + ["draft d", "target t"], ["killed: 8, not 9"]),
        (["draft d", "target t"] * 5, ["no router was killed"]),
        (["draft d", "target t", "router r"] * 3, []),
    ],
)
def test_a_test_with_faults_fails_where_fewer_were_killed_than_asked(killed: list[str], reasons: list[str]) -> None:
    report = Report.of([ANSWERED], Slo(), 0.0, 600.0)
    assert failures(report, read_profile("faults"), Happened(600.4, killed)) == reasons


def test_a_test_fails_without_a_request_below_its_goodput_and_when_a_user_crashes() -> None:
    profile = replace(read_profile("steady"), min_goodput=0.9)
    slow = replace(ANSWERED, ttft_ms=900)
    assert failures(Report.of([], Slo(), 0.0, 1.0), profile, Happened(1)) == ["no request was sent after the warm-up"]
    assert failures(Report.of([ANSWERED, slow], Slo(ttft_ms=100), 0.0, 1.0), profile, Happened(1)) == [
        "goodput is 50.0%, not 90.0%"
    ]
    assert failures(Report.of([ANSWERED], Slo(), 0.0, 1.0), profile, Happened(1, crashes=["x", "x"], num_lost=1)) == [
        "processes of this client that were lost: 1",
        "users crashed 2 times: x",
    ]


def test_who_is_killed_is_asked_of_the_control_plane_as_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_OPERATOR_TOKEN", "mine")

    class Control(control_pb2_grpc.ControlServiceServicer):
        def ListWorkers(self, request: Any, context: Any) -> control_pb2.ListWorkersResponse:
            if ("authorization", "Bearer mine") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return control_pb2.ListWorkersResponse(workers=[control_pb2.WorkerStatus(pid=7)])

    server = grpc.server(ThreadPoolExecutor(1))
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ask = workers_of(f"127.0.0.1:{port}")
    assert [one.pid for one in ask(worker_pb2.WORKER_ROLE_DRAFT)] == [7]
    monkeypatch.setenv("OUTRIDER_OPERATOR_TOKEN", "another")
    assert ask(worker_pb2.WORKER_ROLE_DRAFT) == ()
    server.stop(None).wait()


def test_a_report_without_any_request_can_be_shown() -> None:
    assert "0" in table(Report.of([], Slo(), 0.0, 1.0), read_profile("threshold"), Happened(1))


def test_workers_of_each_role_are_killed_in_turn_and_only_on_this_machine() -> None:
    here, there = "127.0.0.1:9001", "10.0.0.7:9001"
    pids = {worker_pb2.WORKER_ROLE_DRAFT: 11, worker_pb2.WORKER_ROLE_TARGET: 12}

    def workers(role: worker_pb2.WorkerRole.ValueType) -> Sequence[control_pb2.WorkerStatus]:
        return [control_pb2.WorkerStatus(pid=99, address=there), control_pb2.WorkerStatus(pid=pids[role], address=here)]

    killed: list[int] = []
    killer = Killer(Faults(every_s=1), workers, lambda pid, signal: killed.append(pid))
    for _ in range(3):
        killer.strike()
    assert killed == [11, 12, 11]
    assert len(killer.killed) == 3
