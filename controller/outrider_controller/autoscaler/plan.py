"""The plan: for every tenant and target model whether it speculates, with which drafts, and why. Pure.

Only `plan` decides this. The control plane runs it on the evidence of all routers; a router without a control plane
runs it on its own. Everything after it in the path of a request may only speculate less.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from outrider_controller.autoscaler import tuning
from outrider_controller.autoscaler.estimator import Z_80, Column, Estimate, SavingEstimator
from outrider_controller.autoscaler.evidence import Cell
from outrider_controller.autoscaler.rollout import Rollouts, Stage

PLAN_EVERY_S = 1.0


class Mode(enum.IntEnum):
    OFF = 0
    """No request drafts."""
    TRY = 1
    """Plain decoding, except for a share of requests that measures when drafting pays again."""
    ON = 2


class Reason(enum.StrEnum):
    UNKNOWN = "unknown"
    """Too few rounds; the mean of all tenants at the target decides."""
    SAVES = "saves"
    COSTS = "costs"
    BETWEEN = "between"
    """The interval includes both saving and cost, so the mode stays."""
    DWELL = "dwell"
    """The tenant entered its mode too recently to leave it."""
    OPERATOR_ON = "operator_on"
    OPERATOR_OFF = "operator_off"
    LOAD = "load"
    """The target is so full that no drafted row is worth its time."""
    NO_DRAFT = "no_draft"
    """No live draft can serve this target."""

    @property
    def in_words(self) -> str:
        return _IN_WORDS[self]


_IN_WORDS = {
    Reason.UNKNOWN: f"fewer than {tuning.FIRST_ROUNDS:.0f} rounds are known: the mean of all tenants there decides",
    Reason.SAVES: "drafts clearly save time",
    Reason.COSTS: "drafts clearly cost time, or save hardly any",
    Reason.BETWEEN: "it is not clear whether drafts save or cost time: the mode stays",
    Reason.DWELL: f"the evidence is for another mode, but this one holds for at least {tuning.FIRST_ROUNDS:.0f} rounds",
    Reason.OPERATOR_ON: "an operator set it to on",
    Reason.OPERATOR_OFF: "an operator set it to off",
    Reason.LOAD: "the target is so full that no drafted token is worth its row",
    Reason.NO_DRAFT: "no live draft fits this target",
}

_NO_ROLLOUTS: Rollouts = {}
_REASONS = tuple(Reason)
_CODE = {reason: code for code, reason in enumerate(_REASONS)}
_HARD = [_CODE[reason] for reason in (Reason.OPERATOR_ON, Reason.OPERATOR_OFF, Reason.LOAD, Reason.NO_DRAFT)]
"""Reasons that do not come from the evidence."""


class TenantSetting(enum.StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    speculation: TenantSetting = TenantSetting.AUTO
    until_s: float = math.inf
    """When `speculation` becomes auto again and `override_draft_tokens` ends."""
    override_draft_tokens: int | None = None
    """Replaces `max_draft_tokens` until then."""
    max_draft_tokens: int | None = None
    max_wait_us: int | None = None
    weight: float = 1.0
    """Value of a saved token to the tenant: 2 for latency, 0.5 for batch work."""
    min_acceptance: float | None = None
    """A request with a lower acceptance of its last 200 verified tokens decodes plainly from then on."""
    on_counts_as_auto: bool = False
    """Whether a client's `speculation: on` leaves the decision to the plan."""

    @property
    def cap(self) -> int | None:
        """Most drafted tokens per step; None: no limit from the policy."""
        return self.max_draft_tokens if self.override_draft_tokens is None else self.override_draft_tokens

    def at(self, now_s: float) -> TenantPolicy:
        """The policy without an expired override."""
        if now_s < self.until_s:
            return self
        return replace(self, speculation=TenantSetting.AUTO, until_s=math.inf, override_draft_tokens=None)


@dataclass(frozen=True, slots=True)
class TargetState:
    """One target model of the fleet, as its workers report it."""

    drafts: frozenset[str] = frozenset()
    """Versions that live workers could draft with."""
    price: float = 0.0
    """Price of a drafted row at the cheapest worker: the lowest probability of a token that is worth a row."""
    best_chance: float = 1.0
    """Probability of the likeliest first token that any draft proposes here."""
    candidates: frozenset[str] = frozenset()
    """Versions that live workers could draft with, but only for requests that a rollout gives them."""


Fleet = Mapping[str, TargetState]
"""By target model."""
Tenants = Mapping[str, TenantPolicy]
"""A missing tenant has TenantPolicy()."""


@dataclass(frozen=True, slots=True)
class Decision:
    mode: Mode
    reason: Reason
    draft_shares: tuple[tuple[str, float], ...] = ()
    """Share of requests that each draft version gets. The rest decodes plainly."""
    policy: TenantPolicy = field(default_factory=TenantPolicy)
    saving: float = 0.0
    """Expected saving of a round with the best draft, in tokens: a new request starts from it."""
    lower: float = 0.0
    upper: float = 0.0
    """80 % interval of `saving`."""
    rounds: float = 0.0
    """All rounds of evidence, without decay."""
    draft: str = ""
    """The version that `saving` is about: the best available one."""
    price: float = 0.0
    changes: float = 0.0
    """Changes between ON and TRY, halved every ten minutes."""

    def draft_for(self, request_id: str, *, always: bool = False) -> str | None:
        """The draft version of one request, or None for plain decoding. The same on every router. `always`: the request
        drafts in any case, so candidates have their share of such requests too.
        """
        whole = sum(share for _, share in self.draft_shares) if always else 1
        point = whole * int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) / 2**64
        for draft, share in self.draft_shares:
            if point < share:
                return draft
            point -= share
        return None


@dataclass(slots=True)
class Plan:
    """Decisions of one moment, as columns: one entry per cell, and per evidence key where noted."""

    now_s: float = -math.inf
    cells: list[Cell] = field(default_factory=list)
    index: dict[Cell, int] = field(default_factory=dict)
    mode: Column = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    reason: Column = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    since_s: Column = field(default_factory=lambda: np.zeros(0))
    """When the mode was entered."""
    seen_at_entry: Column = field(default_factory=lambda: np.zeros(0))
    """Rounds of evidence when the mode was entered."""
    changes: Column = field(default_factory=lambda: np.zeros(0))
    """Changes between ON and TRY, halved every ten minutes."""
    best: Column = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The key of the draft that most requests get."""
    share: Column = field(default_factory=lambda: np.zeros(0))
    """Per key: its draft's share of the tenant's requests."""
    sent: Column = field(default_factory=lambda: np.zeros(0))
    """The saving that followers of the plan were last sent."""
    load: dict[str, float] = field(default_factory=dict)
    """Targets whose price is too high, and since when."""
    _policies: list[TenantPolicy] = field(default_factory=list)
    _fleet: Fleet = field(default_factory=dict)
    _drafts: list[str] = field(default_factory=list)
    _rows: list[list[int]] | None = None
    _cell_of: Column = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _estimate: Estimate | None = None
    _seen: Column = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def resumed(cls, decisions: Mapping[Cell, Decision], now_s: float) -> Plan:
        """A plan that continues from another process's decisions. The minimum time in each mode starts anew.

        Changes of mode keep their count, or a tenant near the crossing would flap with each new leader.
        """
        cells = list(decisions)
        count = len(cells)
        return cls(
            now_s=now_s,
            cells=cells,
            index={cell: number for number, cell in enumerate(cells)},
            mode=np.array([decision.mode for decision in decisions.values()], dtype=np.int8),
            since_s=np.full(count, now_s),
            seen_at_entry=np.array([decision.rounds for decision in decisions.values()], dtype=float),
            changes=np.array([decision.changes for decision in decisions.values()], dtype=float),
            best=np.full(count, _NEVER, dtype=np.int64),
            reason=np.array([_CODE[decision.reason] for decision in decisions.values()], dtype=np.int8),
            sent=np.full(count, np.inf),
            _policies=[decision.policy for decision in decisions.values()],
        )

    @property
    def estimated(self) -> bool:
        """Whether it was made here, and does not only hold another process's decisions."""
        return self._estimate is not None

    def decision(self, cell: Cell) -> Decision | None:
        number = self.index.get(cell)
        return None if number is None else self._decision(number)

    def changed(self, last: Plan) -> Iterator[tuple[Cell, Decision]]:
        """Decisions that the followers of `last`, the previous plan, need to receive."""
        known = len(last.cells)
        changed = np.ones(len(self.cells), dtype=bool)
        if last.cells == self.cells[:known]:
            changed[:known] = (self.mode[:known] != last.mode) | (self.best[:known] != last.best)
            changed[:known] |= self.sent[:known] != last.sent
            hard = np.isin(self.reason[:known], _HARD) | np.isin(last.reason, _HARD)
            changed[:known] |= hard & (self.reason[:known] != last.reason)
            pairs = zip(self._policies, last._policies, strict=False)
            changed[:known] |= np.array([a is not b and a != b for a, b in pairs], dtype=bool)
            moved = np.ones(len(self.share), dtype=bool)
            old = len(last.share)
            moved[:old] = ~_alike(self.share[:old], last.share)
            changed[self._cell_of[moved]] = True
        for number in np.flatnonzero(changed):
            yield self.cells[number], self._decision(int(number))

    def reason_of(self, number: int) -> Reason:
        """Of a cell, by its number."""
        return _REASONS[int(self.reason[number])]

    def _decision(self, number: int) -> Decision:
        if self._rows is None:
            rows: list[list[int]] = [[] for _ in self.cells]
            for row, cell in enumerate(self._cell_of.tolist()):
                rows[cell].append(row)
            # Assigned whole: the thread of the ops port asks too.
            self._rows = rows
        policy, best = self._policies[number], int(self.best[number])
        assert self._estimate is not None
        saving, error = float(self._estimate.saving[best]), Z_80 * float(self._estimate.error[best])
        state = self._fleet.get(self.cells[number].target)
        return Decision(
            mode=Mode(int(self.mode[number])),
            reason=self.reason_of(number),
            draft_shares=tuple((self._drafts[r], float(s)) for r in self._rows[number] if (s := self.share[r]) > 0),
            policy=policy,
            saving=saving,
            lower=saving - error,
            upper=saving + error,
            rounds=float(self._seen[best]),
            draft=self._drafts[best],
            price=state.price if state is not None else 0.0,
            changes=float(self.changes[number]),
        )


def plan(
    estimator: SavingEstimator,
    tenants: Tenants,
    fleet: Fleet,
    last: Plan,
    now_s: float,
    rollouts: Rollouts = _NO_ROLLOUTS,
) -> Plan:
    """The next plan. `last` is the one in force, whose modes are left only with enough evidence."""
    estimate = estimator.estimate()
    cells = estimator.cells
    rolled = _Rolled(estimator, fleet, rollouts)
    live = _live(estimator, fleet) | rolled.promoted
    was = _Before(estimator, last)
    best = _best(estimator, estimate, live, was, rolled.promoted)
    seen = np.bincount(estimator.cell_of, weights=estimator.column("seen"), minlength=len(cells))
    load = _priced_out(fleet, last, now_s)
    changes = was.changes * 0.5 ** (max(0.0, now_s - last.now_s) / tuning.LONG_S)
    mode, reason = _modes(estimate, best, was, seen, changes)
    policies = [tenants.get(cell.tenant, _DEFAULT).at(now_s) for cell in cells]
    _overrule(mode, reason, cells, policies, live[best], {t for t, s in load.items() if now_s - s >= PLAN_EVERY_S})
    entered, saving = mode != was.mode, estimate.saving[best]
    return Plan(
        now_s=now_s,
        cells=list(cells),
        index=last.index if len(last.cells) == len(cells) and was.aligned else {c: i for i, c in enumerate(cells)},
        mode=mode,
        reason=reason,
        since_s=np.where(entered, now_s, was.since_s),
        seen_at_entry=np.where(entered, seen, was.seen_at_entry),
        # A full target or a lost draft says nothing of how close the two modes are.
        changes=changes + (entered & (was.mode > Mode.OFF) & (mode > Mode.OFF)),
        best=best,
        sent=np.where(np.abs(saving - was.sent) > 2 * tuning.NOTICEABLE, saving, was.sent),
        share=_shares(estimator, estimate, live, best, mode, rolled.canary),
        load=load,
        _policies=policies,
        _fleet=fleet,
        _drafts=[key.draft for key in estimator.keys],
        _cell_of=estimator.cell_of.copy(),
        _estimate=estimate,
        _seen=estimator.column("seen").copy(),
    )


_DEFAULT = TenantPolicy()
_NEVER = -1


class _Before:
    """The last plan's columns in the order of the estimator's. A cell that is not in it has mode _NEVER."""

    def __init__(self, estimator: SavingEstimator, last: Plan) -> None:
        cells, known = estimator.cells, len(last.cells)
        # Keys move up when a tenant is forgotten.
        same_keys = np.array_equal(last._cell_of, estimator.cell_of[: len(last._cell_of)])
        self.aligned = last.cells == cells[:known] and same_keys
        numbers = np.arange(known) if self.aligned else np.array([last.index.get(c, _NEVER) for c in cells], dtype=int)
        here = np.arange(known) if self.aligned else np.flatnonzero(numbers >= 0)
        there = numbers[here] if not self.aligned else here
        self.mode = np.full(len(cells), _NEVER, dtype=np.int8)
        self.since_s = np.zeros(len(cells))
        self.seen_at_entry = np.zeros(len(cells))
        self.changes = np.zeros(len(cells))
        self.best = np.full(len(cells), _NEVER, dtype=np.int64)
        self.sent = np.full(len(cells), np.inf)
        self.mode[here], self.since_s[here] = last.mode[there], last.since_s[there]
        self.seen_at_entry[here], self.changes[here] = last.seen_at_entry[there], last.changes[there]
        self.sent[here] = last.sent[there]
        if self.aligned:
            self.best[here] = last.best


def _live(estimator: SavingEstimator, fleet: Fleet) -> Column:
    """Per key: whether a live worker has its draft."""
    groups = [target in fleet and draft in fleet[target].drafts for target, draft in estimator.groups]
    return np.array(groups, dtype=bool)[estimator.group_of]


class _Rolled:
    """Per key, what the rollouts say of candidates."""

    def __init__(self, estimator: SavingEstimator, fleet: Fleet, rollouts: Rollouts) -> None:
        self.canary = np.zeros(len(estimator))
        """Share of the requests that draft; 0 for a version that is no candidate on trial."""
        self.promoted = np.zeros(len(estimator), dtype=bool)
        for number, (target, draft) in enumerate(estimator.groups):
            rollout = rollouts.get(draft)
            if rollout is None or target not in fleet or draft not in fleet[target].candidates:
                continue
            for row in np.flatnonzero(estimator.group_of == number):
                if rollout.covers(estimator.keys[row].tenant):
                    self.promoted[row] = rollout.stage is Stage.PROMOTED
                    self.canary[row] = rollout.share if rollout.stage is Stage.RUNNING else 0.0


def _best(estimator: SavingEstimator, estimate: Estimate, live: Column, was: _Before, promoted: Column) -> Column:
    """Per cell: the live draft with the greatest saving. The previous one has an advantage, and so has a promoted
    one: the test that it has passed sees smaller differences than the estimates do."""
    score = np.where(live, estimate.saving, estimate.saving - 1e6)
    kept = np.union1d(was.best[was.best >= 0], np.flatnonzero(promoted))
    score[kept] += tuning.NOTICEABLE + estimate.error[kept]
    order = np.lexsort((score, estimator.cell_of))
    ends = np.cumsum(np.bincount(estimator.cell_of, minlength=len(estimator.cells))) - 1
    return np.asarray(order[ends])


def _modes(estimate: Estimate, best: Column, was: _Before, seen: Column, changes: Column) -> tuple[Column, Column]:
    """Modes and reasons from the evidence alone, before operators and load. `changes`: recent ones of the mode."""
    margin = tuning.WIDER * changes
    saving, lower, upper = estimate.saving[best], estimate.lower[best] - margin, estimate.upper[best] + margin
    settled = seen - was.seen_at_entry >= tuning.FIRST_ROUNDS
    # Without any evidence of its own, a cell is decided anew each time from the mean at the target.
    fresh = (was.mode == _NEVER) | (was.mode == Mode.OFF) | (seen == 0)
    # A mode is left when the 80 % interval of the saving is on the other side of what is worth having.
    wants = np.where(upper < tuning.NOTICEABLE, Mode.TRY, np.where(lower > tuning.NOTICEABLE, Mode.ON, was.mode))
    mode = np.where(fresh, np.where(saving > 0, Mode.ON, Mode.TRY), np.where(settled, wants, was.mode)).astype(np.int8)
    reason = np.select(
        [seen < tuning.FIRST_ROUNDS, (mode != wants) & ~fresh, lower > tuning.NOTICEABLE, upper < tuning.NOTICEABLE],
        [_CODE[Reason.UNKNOWN], _CODE[Reason.DWELL], _CODE[Reason.SAVES], _CODE[Reason.COSTS]],
        _CODE[Reason.BETWEEN],
    )
    return mode, reason.astype(np.int8)


def _overrule(
    mode: Column,
    reason: Column,
    cells: list[Cell],
    policies: list[TenantPolicy],
    has_draft: Column,
    full: set[str],
) -> None:
    """Applies, in rising priority: load, operators' settings, and missing drafts."""
    if full:
        loaded = [cell.target in full for cell in cells]
        mode[loaded], reason[loaded] = Mode.OFF, _CODE[Reason.LOAD]
    for number, policy in enumerate(policies):
        if policy.speculation is TenantSetting.AUTO:
            continue
        on = policy.speculation is TenantSetting.ON
        mode[number] = Mode.ON if on else Mode.OFF
        reason[number] = _CODE[Reason.OPERATOR_ON if on else Reason.OPERATOR_OFF]
    mode[~has_draft], reason[~has_draft] = Mode.OFF, _CODE[Reason.NO_DRAFT]


def _shares(
    estimator: SavingEstimator, estimate: Estimate, live: Column, best: Column, mode: Column, canary: Column
) -> Column:
    """Per key: its draft's share of the tenant's requests. One draw serves trials, exploration and canaries."""
    cell_of = estimator.cell_of
    others = live.copy()
    others[best] = False
    count = np.bincount(cell_of, weights=others, minlength=len(mode))
    gap = np.maximum(estimate.saving[best][cell_of] - estimate.saving, tuning.NOTICEABLE)
    explored = tuning.LOSS * estimate.tokens / gap / np.maximum(count[cell_of], 1.0)
    # At most an equal share, where drafts are about equal.
    share = np.where(others, np.minimum(explored, 1 / (1 + count[cell_of])), 0.0)
    share[best] = 1.0 - np.bincount(cell_of, weights=share, minlength=len(mode))
    share = share * (1.0 - np.bincount(cell_of, weights=canary, minlength=len(mode)))[cell_of] + canary
    loss = np.maximum(-estimate.saving[best], tuning.NOTICEABLE)
    trial = np.minimum(tuning.LOSS * estimate.tokens[best] / loss, 1.0)
    wanted = np.select([mode == Mode.ON, mode == Mode.TRY], [1.0, trial], 0.0)
    return np.asarray(share * wanted[cell_of])


def _priced_out(fleet: Fleet, last: Plan, now_s: float) -> dict[str, float]:
    """Targets at which no drafted token is worth a row, and since when."""
    load = {}
    for target, state in fleet.items():
        since_s = last.load.get(target)
        paused = since_s is not None and last.now_s - since_s >= PLAN_EVERY_S
        if state.price > state.best_chance * (tuning.WAKE_SHARE if paused else 1.0):
            load[target] = now_s if since_s is None else min(since_s, now_s)
    return load


def _alike(one: Column, other: Column) -> Column:
    """Whether they are equal, or differ by at most a quarter and neither is 0."""
    return np.asarray(
        (one == other) | ((np.minimum(one, other) > 0) & (3 * np.maximum(one, other) <= 4 * np.minimum(one, other)))
    )
