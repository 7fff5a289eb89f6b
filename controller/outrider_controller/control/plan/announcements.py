"""What operators can see of the plan as it is made: the leader, changes of mode, and alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind

from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.plan import Decision, Plan, TargetState
from outrider_controller.control.alerts.active import Alerts, Change

log = logging.getLogger(__name__)

# Most changes of mode in one plan that get an event and a log line each.
_MAX_ANNOUNCED = 8

Report = Callable[[Iterable[Change]], None]


class Announcements:
    def __init__(self, worker_id: str, events: EventWriter, report: Report) -> None:
        """`report` is called with alerts that are raised or cleared."""
        self.alerts = Alerts()
        self._worker_id = worker_id
        self._events = events
        self._report = report

    def leads(self, epoch: int, num_decisions: int) -> None:
        self._events.emit(EventKind.LEADER_CHANGED, {"worker_id": self._worker_id, "epoch": epoch})
        log.info("leads, epoch %d: %d decisions go on", epoch, num_decisions)

    def step(self, states: Mapping[str, TargetState], now_s: float) -> None:
        self._report(self.alerts.step({model: state.price for model, state in states.items()}, now_s))

    def decided(self, changed: Mapping[Cell, Decision], before: Plan) -> None:
        """Announces the changes of mode among these decisions."""
        num_announced = 0
        for cell, decision in changed.items():
            known = before.index.get(cell)
            if known is None or before.mode[known] == decision.mode or not cell.tenant:
                continue
            self.alerts.mode_changed(cell)
            if num_announced < _MAX_ANNOUNCED:
                num_announced += 1
                self._announce(cell, decision)

    def end(self) -> None:
        """Clears all alerts: the next leader raises its own."""
        self._report(self.alerts.end("the control plane that raised it leads no more"))
        self.alerts = Alerts()

    def _announce(self, cell: Cell, decision: Decision) -> None:
        mode, reason = decision.mode.name.lower(), str(decision.reason)
        fields = {"tenant": cell.tenant, "model": cell.target, "mode": mode, "reason": reason}
        self._events.emit(EventKind.SPECULATION_CHANGED, fields)
        log.info("speculation of %s at %s is %s: %s", cell.tenant, cell.target, mode, reason)
