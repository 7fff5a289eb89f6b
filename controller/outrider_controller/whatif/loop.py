"""Workers in virtual time: each is free at some moment, takes what has arrived by then, and steps."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.draft.worker import DraftWorker
from outrider.target.step.worker import TargetWorker

from outrider_controller.whatif.engine import Clock

Action = Callable[[], None]


@dataclass(slots=True)
class Loop:
    """Actions in the order of their times."""

    now_s: float = 0.0
    _waiting: list[tuple[float, int, Action]] = field(default_factory=list)
    _serials: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, when_s: float, action: Action) -> None:
        heapq.heappush(self._waiting, (max(when_s, self.now_s), next(self._serials), action))

    def run(self, until_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._waiting)
            action()
        self.now_s = until_s


@dataclass(slots=True)
class Process:
    """One worker. `reported` gets each report when its step has ended; `between_steps_s` passes between two steps."""

    loop: Loop
    worker: TargetWorker | DraftWorker
    clock: Clock
    reported: Callable[[Any], None]
    between_steps_s: float = 0.0
    _inbox: list[Any] = field(default_factory=list)
    _free_s: float = 0.0
    _due_s: float = math.inf

    def deliver(self, when_s: float, event: Any) -> None:
        self.loop.at(when_s, lambda: self._arrived(event))

    def _arrived(self, event: Any) -> None:
        self._inbox.append(event)
        self._wake(max(self.loop.now_s, self._free_s))

    def _wake(self, when_s: float) -> None:
        if when_s < self._due_s:
            self._due_s = when_s
            self.loop.at(when_s, self._turn)

    def _turn(self) -> None:
        if self.loop.now_s < self._due_s or self.loop.now_s < self._free_s:
            return
        self._due_s, self.clock.now_s = math.inf, self.loop.now_s
        arrived, self._inbox = self._inbox, []
        for event in arrived:
            self.worker.apply(event)
        again_s = self.worker.step()
        ended_s, report = self.clock.now_s, self.worker.take_report()
        self._free_s = ended_s + (self.between_steps_s if ended_s > self.loop.now_s else 0.0)
        self.loop.at(ended_s, lambda: self.reported(report))
        if again_s is not None:
            self._wake(max(self._free_s, again_s))
