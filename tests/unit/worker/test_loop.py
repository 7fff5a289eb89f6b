"""One turn of a worker: what comes in, what goes out, and what a fault in it may cost."""

from __future__ import annotations

import io
import logging
import threading
import time
from dataclasses import dataclass

import pytest
from outrider.engine import DeviceLost
from outrider.telemetry.logging import configure_logging
from outrider.worker.events import DrainStarted, PeerStreamEnded, SequenceKey, WorkerReport
from outrider.worker.faults import WholeStepFailed
from outrider.worker.loop import StepLoop

from .fake_machine import FakeMachine


def test_a_turn_applies_all_in_order_steps_once_and_hands_out_what_came_of_it() -> None:
    machine, reports = FakeMachine(), list[WorkerReport]()
    machine.wake_at_s = 7.0
    loop = StepLoop(machine, reports.append)
    assert loop.turn(["a", "b"]) == 7.0
    assert (machine.applied, machine.num_steps) == (["a", "b"], 1)
    assert [str(failed.error) for failed in reports[0].failures] == ["a", "b"]
    assert loop.load.num_running == 1


def test_a_fault_in_one_event_costs_no_other_event() -> None:
    machine = FakeMachine()
    loop = StepLoop(machine, lambda report: None, lambda: 5.0)
    loop.turn(["a", FakeMachine.BREAKS, PeerStreamEnded(3), DrainStarted()])
    assert machine.applied == ["a", PeerStreamEnded(3), DrainStarted()]
    assert len(machine.failed) == 1 and machine.num_steps == 1


def test_what_a_message_breaks_is_its_own_sequence() -> None:
    machine, reports = FakeMachine(), list[WorkerReport]()

    @dataclass
    class Breaks:
        key: SequenceKey

        def __eq__(self, other: object) -> bool:
            raise OverflowError("what no check foresaw")

    StepLoop(machine, reports.append).turn(["a", Breaks(SequenceKey(2, 9)), PeerStreamEnded(3)])
    assert machine.applied == ["a", PeerStreamEnded(3)] and machine.failed == []
    [_, failed] = reports[0].failures
    assert failed.key == SequenceKey(2, 9) and isinstance(failed.error, OverflowError)


def test_a_fault_in_the_step_is_told_to_all_and_the_next_waits_a_little() -> None:
    machine, reports = FakeMachine(), list[WorkerReport]()
    machine.step_breaks = True
    wake_at_s = StepLoop(machine, reports.append, lambda: 5.0).turn(["a"])
    assert wake_at_s is not None and 5.0 < wake_at_s < 6.0
    assert len(machine.failed) == len(reports) == 1


class Dying(FakeMachine):
    """Its steps raise these, one after another; None: the step succeeds."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__()
        self.errors = list(errors)

    def step(self) -> float | None:
        if error := self.errors.pop(0):
            raise error
        return super().step()


@pytest.mark.parametrize(
    ("errors", "num_turns"),
    [
        ([ValueError()] * 3, 3),
        ([WholeStepFailed()] * 3, 3),
        ([ValueError(), None, WholeStepFailed(), ValueError(), WholeStepFailed()], 5),
        ([DeviceLost("cuda:0")], 1),
    ],
)
def test_a_lost_device_or_three_failed_steps_in_a_row_end_the_process(
    errors: list[Exception | None], num_turns: int
) -> None:
    ended: list[str] = []
    loop = StepLoop(Dying(*errors), lambda report: None, end=lambda problem, error: ended.append(problem))
    for _ in range(num_turns - 1):
        loop.turn([])
        assert not ended and not loop.problem
    loop.turn([])
    assert len(ended) == 1 and ended[0] in loop.problem


def test_sequences_of_a_worker_that_ends_are_not_failed_but_left_to_others() -> None:
    machine = Dying(WholeStepFailed(), WholeStepFailed(), DeviceLost("cuda:0"))
    loop = StepLoop(machine, lambda report: None, lambda: 5.0, end=lambda problem, error: None)
    wake_at_s = loop.turn([])
    assert wake_at_s is not None and 5.0 < wake_at_s < 6.0
    loop.turn([])
    loop.turn([])
    assert not machine.failed


@pytest.fixture
def logged() -> io.StringIO:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("draft", "human", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_log_says_where_a_fault_was_and_nothing_that_its_message_may_quote(logged: io.StringIO) -> None:
    StepLoop(FakeMachine(), lambda report: None).turn([FakeMachine.BREAKS])
    lines = logged.getvalue()
    assert "the step loop failed" in lines and "ValueError" in lines and "fake_machine.py" in lines
    assert "4711" not in lines


def test_it_is_known_from_outside_how_long_a_turn_has_lasted() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(FakeMachine):
        def step(self) -> float | None:
            entered.set()
            assert leave.wait(30)
            return super().step()

    loop = StepLoop(Slow(), lambda report: None)
    loop.start()
    assert loop.busy_since_s is None
    before_s = time.monotonic()
    loop.post(["a"])
    assert entered.wait(30)
    assert loop.busy_since_s is not None and before_s <= loop.busy_since_s <= time.monotonic()
    leave.set()
    loop.stop()
    assert loop.busy_since_s is None
