"""The file that Locust loads: the users, the shape and the faults of one profile, and a report at the end.

    LOADTEST_PROFILE=steady LOADTEST_HTTP=127.0.0.1:8000 LOADTEST_GRPC=127.0.0.1:8001 LOADTEST_MODEL=NAME \
        python -m locust -f loadtest/locustfile.py

`python -m loadtest` sets these variables from the stack that runs here. Locust reads this file in each of its
processes; the outcomes of its workers come to the master.
"""

from __future__ import annotations

import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent
import psutil
from locust import LoadTestShape, events
from locust.runners import WorkerRunner

from benchmarks.support.prompts import read_prompts
from loadtest.faults import Killer, workers_of
from loadtest.outcomes import Outcome, Report
from loadtest.settings import read_profile
from loadtest.table import table, write_report
from loadtest.users import Endpoints, user_classes

# Must run before any channel is made: otherwise a call blocks all greenlets.
grpc_gevent.init_gevent()

_HERE = Path(__file__).parent
_SPAWN_PER_S = 100.0

profile = read_profile(os.environ.get("LOADTEST_PROFILE", "steady"))
prompts = read_prompts(_HERE / os.environ.get("LOADTEST_PROMPTS", profile.prompts))
endpoints = Endpoints(
    http=os.environ.get("LOADTEST_HTTP", "127.0.0.1:8000"),
    grpc=os.environ.get("LOADTEST_GRPC", "127.0.0.1:8001"),
    model=os.environ.get("LOADTEST_MODEL", "smollm2-135m-instruct"),
    control=os.environ.get("LOADTEST_CONTROL", ""),
)


class Run:
    """One test, from its start to its report."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.unsent: list[Outcome] = []
        self.started_s = self.ended_s = 0.0
        self.killer: Killer | None = None
        self.client = psutil.Process()

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.unsent.append(outcome)

    def start(self) -> None:
        self.outcomes.clear()
        self.started_s = time.time()
        self.client.cpu_percent()
        if profile.faults and endpoints.control:
            self.killer = Killer(profile.faults, workers_of(endpoints.control))
            gevent.spawn(self._strike, profile.faults.every_s)

    def stop(self) -> None:
        self.ended_s = time.time()
        self.cpu = self.client.cpu_percent() / 100

    def _strike(self, every_s: float) -> None:
        while True:
            gevent.sleep(every_s)
            if self.ended_s or self.killer is None:
                return
            self.killer.strike()

    def report(self) -> Report:
        begin_s = self.started_s + profile.warm_up_s
        counted = [outcome for outcome in self.outcomes if outcome.sent_s >= begin_s]
        return Report.of(counted, profile.slo, self.ended_s - begin_s)


run = Run()
globals().update(user_classes(profile, prompts, endpoints, run.record))


class ProfileShape(LoadTestShape):
    """The profile's shape in Locust's interface."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0
        self._wanted = 0

    def tick(self) -> tuple[int, float] | None:
        recent = run.outcomes[self._seen :]
        wanted = profile.shape.users(self.get_run_time(), recent, profile.slo)
        if wanted is None:
            return None
        if wanted != self._wanted:
            self._seen, self._wanted = len(run.outcomes), wanted
        return wanted, _SPAWN_PER_S


@events.test_start.add_listener
def on_start(environment: Any, **_: Any) -> None:
    run.start()


@events.test_stop.add_listener
def on_stop(environment: Any, **_: Any) -> None:
    run.stop()


@events.report_to_master.add_listener
def on_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    data["outcomes"], run.unsent = [astuple(outcome) for outcome in run.unsent], []


@events.worker_report.add_listener
def on_worker_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    run.outcomes.extend(Outcome(*values) for values in data.get("outcomes", ()))


@events.quitting.add_listener
def on_quit(environment: Any, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner) or not run.ended_s:
        return
    report = run.report()
    killed = run.killer.killed if run.killer else []
    spared = profile.faults is not None and not killed
    print(table(report, profile, killed, run.cpu), flush=True)
    write_report(os.environ.get("LOADTEST_JSON", ""), report, profile, killed, run.cpu)
    failed = report.total["failed"] or not report.total["requests"] or report.total["goodput"] < profile.min_goodput
    environment.process_exit_code = 1 if failed or spared else 0
