"""A machine without a model: notes what happens to it, and breaks on demand."""

from __future__ import annotations

from outrider.worker.events import DrainStarted, Failed, Load, PeerStreamEnded, SequenceKey, WorkerEvent, WorkerReport


class FakeMachine:
    """`BREAKS` is an event that it cannot follow; other strings are noted and answered by a failure of stream 1."""

    BREAKS = "breaks: prompt 17 4711"

    def __init__(self) -> None:
        self.applied: list[str | WorkerEvent] = []
        self.failed: list[Exception] = []
        self.num_steps = 0
        self.wake_at_s: float | None = None
        self.step_breaks = False
        self._report = WorkerReport()
        self._draining = False

    @property
    def load(self) -> Load:
        return Load(num_running=self.num_steps, draining=self._draining)

    def apply(self, event: str | WorkerEvent) -> None:
        if event == self.BREAKS:
            raise ValueError(self.BREAKS)
        self._draining |= isinstance(event, DrainStarted)
        self.applied.append(event)
        if isinstance(event, str):
            self._report.failures.append(Failed(SequenceKey(1, len(self.applied)), RuntimeError(event)))

    def step(self) -> float | None:
        self.num_steps += 1
        if self.step_breaks:
            raise ValueError(self.BREAKS)
        return self.wake_at_s

    def take_report(self) -> WorkerReport:
        report, self._report = self._report, WorkerReport()
        return report

    def fail(self, key: SequenceKey, error: Exception) -> None:
        self._report.failures.append(Failed(key, error))

    def fail_all(self, error: Exception) -> None:
        self.failed.append(error)

    @property
    def ended_streams(self) -> list[int]:
        return [event.stream for event in self.applied if isinstance(event, PeerStreamEnded)]
