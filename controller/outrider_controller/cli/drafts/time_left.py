"""What a command of hours says: a line on stderr each 30 s, with the time that is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from outrider_controller.cli.output import note

INTERVAL_S = 30.0


class TimeLeft:
    """Call it with what is done, as often as you like. While it is open, a thread writes, even when nobody calls."""

    def __init__(
        self,
        write: Callable[[str], None] = note,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._write = write
        self._clock = clock
        self._interval_s = interval_s
        self._began_s = clock()
        self._stage: _Stage | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="time left", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        """`done` of `total` tokens of a stage. One stage comes after another."""
        if self._stage is None or self._stage.name != stage:
            self._stage = _Stage(stage, done, self._clock())
        self._stage.done, self._stage.total, self._stage.text = done, total, text

    def line(self) -> str:
        if self._stage is None:
            return f"starting, for {span(self._clock() - self._began_s)} now"
        return self._stage.line(self._clock())

    def _tick(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._write(self.line())


class _Stage:
    """What was done when this run began with it is no sign of this run's speed."""

    def __init__(self, name: str, done: int, now_s: float) -> None:
        self.name = name
        self.done = self._first = done
        self._began_s = now_s
        self.total = 0
        self.text = ""

    def line(self, now_s: float) -> str:
        share = 100 * self.done // max(self.total, 1)
        said = f"{self.name}: {share} % ({self.done:,} of {self.total:,} tokens), {self._left(now_s)}"
        return f"{said}; {self.text}" if self.text else said

    def _left(self, now_s: float) -> str:
        fresh = self.done - self._first
        if fresh <= 0:
            return "time left not known yet"
        return f"about {span((self.total - self.done) * (now_s - self._began_s) / fresh)} left"


def span(seconds: float) -> str:
    """As people say it: 40 s, 14 min, 2 h 10 min."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
