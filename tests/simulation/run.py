"""Runs one schedule from its first request until nothing happens any more, and checks the outcome."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from outrider.rpc.v1 import router_pb2
from outrider.sim.clock import Deadlock, Livelock, VirtualLoop, run_virtually
from outrider_controller.router.fleet.loads import MAX_REPORT_AGE_S

from tests.simulation.client import Answer, Clients
from tests.simulation.processes import TargetProcess
from tests.simulation.schedule import RequestPlan, Schedule
from tests.simulation.verdict import answer_problems, leftovers
from tests.simulation.world import World

Print = Callable[[str], None]

# Longest duration of a request: deadlines are 60 s.
_PATIENCE_S = 120.0
# After the last request: time for a close to arrive, one step, and a reconnection.
_SETTLE_S = 1.2


@dataclass(slots=True)
class Outcome:
    """The outcome of one schedule."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of events in the run, by name."""
    virtual_s: float = 0.0


def run_schedule(schedule: Schedule, trace: Print | None = None) -> Outcome:
    """Runs it in virtual time. `trace` receives a log line for each event."""
    outcome = Outcome(schedule.seed)
    loop = VirtualLoop()
    started_s = loop.time()

    def note(line: str) -> None:
        if trace is not None:
            trace(f"{loop.time() - started_s:9.4f} {line}")

    with _repeatable(schedule.seed), _errors_logged() as logged:
        try:
            run_virtually(_run(schedule, outcome, None if trace is None else note), loop)
        except (Deadlock, Livelock) as error:
            outcome.violations.append(str(error))
    outcome.virtual_s = loop.time() - started_s
    outcome.violations += [f"nobody took an exception: {what}" for what in loop.unhandled]
    outcome.violations += [f"logged as an error: {line}" for line in logged]
    for violation in outcome.violations:
        note(f"VIOLATION {violation}")
    return outcome


async def _run(schedule: Schedule, outcome: Outcome, note: Print | None) -> None:
    async with World(schedule, note) as world:
        clients = Clients(world)
        asking = [asyncio.create_task(clients.ask(plan)) for plan in schedule.requests]
        _, unended = await asyncio.wait(asking, timeout=_PATIENCE_S)
        outcome.violations += [f"{len(unended)} requests never end"] if unended else []
        answers = [task.result() for task in asking if task not in unended]
        await world.faults_over()
        await asyncio.sleep(_SETTLE_S)
        outcome.violations += leftovers(world)
        if not outcome.violations:
            # A router that has lost the metadata store may use its last reports for this long.
            await asyncio.sleep(MAX_REPORT_AGE_S)
            answers.append(await _last(world, clients))
            await asyncio.sleep(_SETTLE_S / 2)
            outcome.violations += leftovers(world)
        outcome.violations += world.witness.violations
        for answer in answers:
            outcome.violations += answer_problems(world, answer)
        if clients.admission.running != len(unended):
            outcome.violations.append(f"the gateway counts {clients.admission.running} requests under way")
        _count(outcome, world, answers)


async def _last(world: World, clients: Clients) -> Answer:
    """Sends one more request after all faults are over, which must be answered."""
    plan = RequestPlan(
        number=len(world.schedule.requests),
        at_s=0.0,
        prompt=(7, 8, 9),
        max_tokens=6,
        temperature=0.0,
        top_k=0,
        seed=None,
        stop_token_ids=(),
        speculation=router_pb2.SPECULATION_MODE_ON,
        max_draft_tokens=None,
        timeout_s=60.0,
    )
    world.texts.add(plan)
    return await clients.ask(plan)


def _count(outcome: Outcome, world: World, answers: list[Answer]) -> None:
    counts = outcome.counts
    counts.update(world.counts)
    counts.update(world.witness.counts)
    counts["drafts and commits tampered with"] = world.hostility.num_tampered
    counts["requests"] = len(answers)
    for answer in answers:
        counts[f"end: {answer.end}"] += 1
    for process in (*world.places.values(), *world.gone):
        if isinstance(process, TargetProcess):
            stats = process.worker.stats
            counts["preemptions"] += stats.num_preemptions
            counts["refused drafts"] += stats.num_refused_drafts
            counts["failed steps"] += stats.num_step_failures
            counts["tokens verified on branches"] += stats.num_branch_tokens
            counts["tokens accepted beside a guess"] += stats.num_branch_tokens_accepted


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Seeds the common random generator, which production uses for jitter and ties between workers, and the request
    ids, which divide a tenant's requests between drafts."""
    state, ids = random.getstate(), random.Random(f"ids {seed}")
    random.seed(f"production {seed}")
    try:
        with mock.patch("uuid.uuid4", lambda: uuid.UUID(int=ids.getrandbits(128), version=4)):
            yield
    finally:
        random.setstate(state)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # Planted faults are expected in the log.
        planted = "StepFailed" in (text := self.format(record))
        if not planted:
            self.lines.append(text)


@contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """Collects logged errors: unexpected faults that a handler caught."""
    handler = _Errors()
    loggers = [logging.getLogger(name) for name in ("outrider", "outrider_controller")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield handler.lines
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
