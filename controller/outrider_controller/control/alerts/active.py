"""The active alerts, from the evidence of all routers, changes of mode and targets' prices. Pure: the clock is an
argument. `alert_report` sends them.

An alert is raised at one bound and cleared at another, so that it does not flicker. It is also cleared when its tenant
has sent no evidence for a while.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey

RECENT_S, HOUR_S = 60.0, 3600.0
_QUIET_S = 300.0
# Fewest verified tokens from which an acceptance is taken.
_MIN_RECENT, _MIN_HOUR = 200.0, 2000.0
_FELL_BY, _BACK_WITHIN = 0.1, 0.05
_LOOP_ACCEPTANCE, _LOOP_TOKENS = 0.98, 1000.0
_STARVED, _FED = 0.5, 0.25
_MIN_ROUNDS = 200.0
_MAX_MODE_CHANGES, _MODE_CHANGES_S = 2, 600.0
_HIGH_PRICE, _LOW_PRICE, _HIGH_FOR_S = 0.5, 0.4, 60.0


class AlertKind(enum.StrEnum):
    """All alerts. docs/operations.md describes what to do about each."""

    ACCEPTANCE_FELL = "acceptance_fell"
    """Acceptance is 0.1 lower than over the tenant's last hour: the text or a draft has changed."""
    OUTPUT_LOOPS = "output_loops"
    """Acceptance is above 0.98 for 1,000 tokens: only a text that repeats itself is that easy to draft."""
    DRAFTS_STARVED = "drafts_starved"
    """For more than half of the rounds no draft came in time, or none drafted: without room, or still prefilling."""
    MODE_FLAPS = "mode_flaps"
    """More than two changes of mode in ten minutes."""
    PRICE_HIGH = "price_high"
    """A drafted row has cost more than 0.5 tokens for a minute: the target is full."""


@dataclass(frozen=True, slots=True)
class Alert:
    kind: AlertKind
    model: str
    tenant: str = ""
    """Empty: about the target, for all tenants."""


@dataclass(frozen=True, slots=True)
class Change:
    """An alert that was raised or cleared."""

    alert: Alert
    raised: bool
    reason: str
    """Text with the numbers."""


@dataclass(slots=True)
class _Window:
    """Sums with exponential decay over time."""

    span_s: float
    sums: Evidence = field(default_factory=Evidence)

    def fade(self, elapsed_s: float) -> None:
        kept = math.exp(-elapsed_s / self.span_s)
        sums = self.sums
        sums.rounds, sums.late, sums.missed = sums.rounds * kept, sums.late * kept, sums.missed * kept
        sums.verified, sums.accepted = sums.verified * kept, sums.accepted * kept

    @property
    def acceptance(self) -> float:
        return self.sums.accepted / self.sums.verified if self.sums.verified else 0.0


@dataclass(slots=True)
class _Watched:
    """One tenant at one target."""

    seen_s: float
    recent: _Window = field(default_factory=lambda: _Window(RECENT_S))
    hour: _Window = field(default_factory=lambda: _Window(HOUR_S))
    run: Evidence = field(default_factory=Evidence)
    """Sums of the present run of 1,000 verified tokens."""
    mode_changes_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_MODE_CHANGES + 1))

    def add(self, evidence: Evidence, now_s: float) -> None:
        for window in (self.recent, self.hour):
            window.fade(max(0.0, now_s - self.seen_s))
            window.sums.merge(evidence)
        self.run.merge(evidence)
        self.seen_s = now_s


class Alerts:
    """The alerts of one cluster. A step's cost grows with the tenants that have new evidence or an alert."""

    def __init__(self) -> None:
        self.active: dict[Alert, str] = {}
        """By alert: why it was raised."""
        self._news: dict[Cell, Evidence] = {}
        self._changed: set[Cell] = set()
        self._watched: dict[Cell, _Watched] = {}
        self._high_since_s: dict[str, float] = {}
        self._swept_s = -math.inf

    def learn(self, evidence: Mapping[EvidenceKey, Evidence]) -> None:
        """Adds a router's evidence since its last report."""
        for key, one in evidence.items():
            self._news.setdefault(key.cell, Evidence()).merge(one)

    def end(self, reason: str) -> list[Change]:
        """Clears all alerts."""
        ended = [Change(alert, False, reason) for alert in self.active]
        self.active = {}
        return ended

    def mode_changed(self, cell: Cell) -> None:
        self._changed.add(cell)

    def step(self, prices: Mapping[str, float], now_s: float) -> list[Change]:
        """The changes since the last step. `prices`: of a drafted row, by target."""
        news, self._news = self._news, {}
        changed, self._changed = self._changed, set()
        for cell, evidence in news.items():
            self._of(cell, now_s).add(evidence, now_s)
        for cell in changed:
            self._of(cell, now_s).mode_changes_s.append(now_s)
        alerted = {Cell(alert.tenant, alert.model) for alert in self.active if alert.tenant}
        found = [change for cell in {*news, *changed, *alerted} for change in self._check(cell, now_s)]
        found += [change for model, price in prices.items() for change in self._check_price(model, price, now_s)]
        self._forget(now_s)
        return found

    def _of(self, cell: Cell, now_s: float) -> _Watched:
        return self._watched.setdefault(cell, _Watched(now_s))

    def _check(self, cell: Cell, now_s: float) -> Iterator[Change]:
        watched = self._watched[cell]
        if now_s - watched.seen_s > _QUIET_S:
            for kind in (AlertKind.ACCEPTANCE_FELL, AlertKind.OUTPUT_LOOPS, AlertKind.DRAFTS_STARVED):
                yield from self._set(kind, cell, False, "nothing was drafted for a while")
        else:
            yield from self._check_acceptance(cell, watched)
            yield from self._check_run(cell, watched)
            yield from self._check_lateness(cell, watched)
        changes = sum(now_s - at_s <= _MODE_CHANGES_S for at_s in watched.mode_changes_s)
        reason = f"{changes} changes of mode in ten minutes"
        yield from self._set(AlertKind.MODE_FLAPS, cell, changes > _MAX_MODE_CHANGES, reason)

    def _check_acceptance(self, cell: Cell, watched: _Watched) -> Iterator[Change]:
        recent, hour = watched.recent, watched.hour
        if recent.sums.verified < _MIN_RECENT or hour.sums.verified < _MIN_HOUR:
            return
        fell = hour.acceptance - recent.acceptance
        reason = f"{recent.acceptance:.2f} over the last minute, {hour.acceptance:.2f} over the last hour"
        yield from self._between(AlertKind.ACCEPTANCE_FELL, cell, fell, _FELL_BY, _BACK_WITHIN, reason)

    def _check_run(self, cell: Cell, watched: _Watched) -> Iterator[Change]:
        run = watched.run
        if run.verified < _LOOP_TOKENS:
            return
        watched.run = Evidence()
        acceptance = run.accepted / run.verified
        reason = f"{acceptance:.3f} of the last {run.verified:.0f} drafted tokens were accepted"
        yield from self._set(AlertKind.OUTPUT_LOOPS, cell, acceptance > _LOOP_ACCEPTANCE, reason)

    def _check_lateness(self, cell: Cell, watched: _Watched) -> Iterator[Change]:
        recent = watched.recent.sums
        if recent.rounds + recent.missed >= _MIN_ROUNDS:
            reason = f"no draft in time for {recent.starved:.0%} of the rounds of the last minute"
            if recent.missed:
                reason += f", and none at all for {recent.missed / (recent.rounds + recent.missed):.0%}"
            yield from self._between(AlertKind.DRAFTS_STARVED, cell, recent.starved, _STARVED, _FED, reason)

    def _check_price(self, model: str, price: float, now_s: float) -> Iterator[Change]:
        cell = Cell("", model)
        if price <= _HIGH_PRICE:
            self._high_since_s.pop(model, None)
            if price <= _LOW_PRICE:
                yield from self._set(AlertKind.PRICE_HIGH, cell, False, f"a drafted row costs {price:.2f} tokens")
            return
        since_s = self._high_since_s.setdefault(model, now_s)
        if now_s - since_s >= _HIGH_FOR_S:
            yield from self._set(AlertKind.PRICE_HIGH, cell, True, f"a drafted row costs {price:.2f} tokens")

    def _between(
        self, kind: AlertKind, cell: Cell, value: float, raise_at: float, clear_at: float, reason: str
    ) -> Iterator[Change]:
        """Raises or clears the alert; between the two bounds it stays unchanged."""
        if value >= raise_at or value < clear_at:
            yield from self._set(kind, cell, value >= raise_at, reason)

    def _set(self, kind: AlertKind, cell: Cell, up: bool, reason: str) -> Iterator[Change]:
        alert = Alert(kind, cell.target, cell.tenant)
        if up == (alert in self.active):
            return
        if up:
            self.active[alert] = reason
        else:
            del self.active[alert]
        yield Change(alert, up, reason)

    def _forget(self, now_s: float) -> None:
        """Drops tenants without evidence for an hour."""
        if now_s - self._swept_s < RECENT_S:
            return
        self._swept_s = now_s
        alerted = {Cell(alert.tenant, alert.model) for alert in self.active}
        stale = [c for c, one in self._watched.items() if now_s - one.seen_s > HOUR_S and c not in alerted]
        for cell in stale:
            del self._watched[cell]
