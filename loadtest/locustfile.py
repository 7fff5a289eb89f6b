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
from locust import LoadTestShape, events
from locust.runners import Runner, WorkerRunner

from loadtest.clients import TIMEOUT_S
from loadtest.faults import Killer, workers_of
from loadtest.outcomes import Outcome, Report
from loadtest.prompts import read_prompts
from loadtest.settings import read_profile
from loadtest.table import table, write_report
from loadtest.users import Endpoints, user_classes
from loadtest.verdict import Happened, failures

# Must run before any channel is made: otherwise a call blocks all greenlets.
grpc_gevent.init_gevent()

_HERE = Path(__file__).parent
_SPAWN_PER_S = 100.0
_REPORT_S = 30.0
"""How long a worker's last report may take after its users were stopped."""

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
        self.cpus: dict[str, float] = {}
        """Cores that each process used, by its name; the name of this one is empty."""
        self.finished: dict[str, bool] = {}
        """Of each worker of Locust's: whether its users have all stopped. Empty without such workers."""
        self._cpu_s = 0.0

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.unsent.append(outcome)

    def start(self, runner: Runner) -> None:
        self.outcomes.clear()
        self.cpus.clear()
        self.runner = runner
        self.started_s, self.ended_s, self._cpu_s = time.time(), 0.0, time.process_time()
        # Locust starts a test in each of its processes; only one of them may kill.
        if profile.faults and endpoints.control and not isinstance(runner, WorkerRunner):
            self.killer = Killer(profile.faults, workers_of(endpoints.control))
            gevent.spawn(self._strike, self.killer, profile.faults.every_s)

    def end_load(self) -> None:
        """From here on no request is sent; those that are under way are still answered."""
        self.ended_s = time.time()

    def stop(self) -> None:
        if not self.ended_s:
            self.end_load()
        self.cpus[""] = self.cpu

    @property
    def cpu(self) -> float:
        """Cores that this process used since the start."""
        return (time.process_time() - self._cpu_s) / (time.time() - self.started_s)

    def _strike(self, killer: Killer, every_s: float) -> None:
        gevent.sleep(every_s)
        while killer is self.killer and not self.ended_s:
            killer.strike()
            gevent.sleep(every_s)

    def report(self) -> Report:
        return Report.of(self.outcomes, profile.slo, self.started_s + profile.warm_up_s, self.ended_s)


run = Run()
globals().update(user_classes(profile, prompts, endpoints, run.record))


class ProfileShape(LoadTestShape):
    """The profile's shape in Locust's interface."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0
        self._wanted = 0

    def tick(self) -> tuple[int, float] | None:
        if not run.ended_s:
            recent = run.outcomes[self._seen :]
            wanted = profile.shape.users(self.get_run_time(), recent, profile.slo)
            if wanted is None:
                run.end_load()
            elif wanted != self._wanted:
                self._seen, self._wanted = len(run.outcomes), wanted
        if not run.ended_s:
            return self._wanted, _SPAWN_PER_S
        # At None Locust's master ends its workers at once; at 0 users each first gets its answer. All stop together.
        return (0, max(_SPAWN_PER_S, self._wanted)) if self._unfinished() else None

    def _unfinished(self) -> bool:
        # A worker reports every 3 s; the master's own count of its users may be older than they are.
        left = not all(run.finished.values()) if run.finished else self.get_current_user_count() > 0
        return left and time.time() < run.ended_s + self.runner.environment.stop_timeout + _REPORT_S


@events.init.add_listener
def on_init(environment: Any, **_: Any) -> None:
    environment.stop_timeout = environment.stop_timeout or TIMEOUT_S


@events.test_start.add_listener
def on_start(environment: Any, **_: Any) -> None:
    run.start(environment.runner)


@events.test_stop.add_listener
def on_stop(environment: Any, **_: Any) -> None:
    run.stop()


@events.report_to_master.add_listener
def on_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    data["outcomes"], run.unsent = [astuple(outcome) for outcome in run.unsent], []
    data["cpu"] = run.cpu
    data["finished"] = run.started_s > 0 and run.runner.target_user_count == run.runner.user_count == 0


@events.worker_report.add_listener
def on_worker_report(client_id: str, data: dict[str, Any], **_: Any) -> None:
    run.outcomes.extend(Outcome(*values) for values in data["outcomes"])
    run.cpus[client_id], run.finished[client_id] = data["cpu"], data["finished"]


@events.quitting.add_listener
def on_quit(environment: Any, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner) or not run.ended_s:
        return
    report = run.report()
    happened = Happened(
        load_s=run.ended_s - run.started_s,
        killed=run.killer.killed if run.killer else (),
        crashes=[row["msg"] for row in environment.runner.exceptions.values() for _ in range(row["count"])],
        cpus=list(run.cpus.values()),
        num_lost=list(run.finished.values()).count(False),
    )
    print(table(report, profile, happened), flush=True)
    write_report(os.environ.get("LOADTEST_JSON", ""), report, profile, happened)
    environment.process_exit_code = 1 if failures(report, profile, happened) else 0
