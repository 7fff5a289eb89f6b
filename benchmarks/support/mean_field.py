"""A day of many targets and tenants as a mean field: drafts of which kind, what they cost and save. Pure.

Every target has the same mix of tenants. An hour is a fixed point: the load sets the time of a step and the price of a
row, these set how far each tenant drafts and what that saves, the plan sets who drafts with what, and that sets the
load. Estimates and plan are those that ship; they go from hour to hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from outrider_controller.autoscaler import tuning
from outrider_controller.autoscaler.estimator import Column, SavingEstimator
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Plan, TargetState, plan
from outrider_controller.autoscaler.sizing import Sizing, Utilisation, sizing

from benchmarks.support.machines import Machine

_MODEL = "target"
_HOUR_S = 3600.0
_PLANS = 3
"""Plans of an hour: the first ones see what the others changed."""
_CLASSES = 200
_ACCEPTANCE = ((np.arange(_CLASSES) + 0.5) / _CLASSES)[:, None]
"""Of each class of tenants at a draft."""
_TURNS, _CLOSE = 100, 1e-4
_MAX_TARGETS = 1 << 24


@dataclass(frozen=True, slots=True)
class Draft:
    """A kind of draft worker."""

    name: str
    machine: Machine
    price: float
    """Of an hour."""
    acceptance: Column
    """By tenant: the chance that a drafted token is accepted after only accepted ones."""
    batch: int = 16
    """Sequences of a forward."""

    @property
    def forward_s(self) -> float:
        return self.machine.step_s(self.batch, self.batch)


@dataclass(frozen=True, slots=True)
class Day:
    """`weights`: each tenant's part of the tokens. `rates`: tokens per second of all, for each hour."""

    target: Machine
    target_price: float
    token_s: float
    """The time of a token that is promised: so many targets run that the mean is not above it."""
    drafts: Sequence[Draft]
    weights: Column
    rates: Sequence[float]
    round_trip_s: float = 0.001
    most_draft_tokens: int = 5
    most_sequences: int = 256
    """Of a target, for their keys and values."""


@dataclass(frozen=True, slots=True)
class Hour:
    rate: float
    plain_targets: int
    targets: int
    """With drafts."""
    drafts: Mapping[str, int]
    drafting: float
    """Part of the tokens whose requests have a draft."""
    token_s: float
    """On as many targets as plain decoding needs, with drafts."""
    cost: float
    plain_cost: float

    @property
    def saving(self) -> float:
        return 1 - self.cost / self.plain_cost


@dataclass(frozen=True, slots=True)
class _Load:
    """The fixed point of one target. Columns are [classes, drafts]."""

    step_s: float
    price: float
    token_s: float
    """Mean over tokens; infinite for more sequences than fit."""
    num_drafted: Column
    """Tokens that a round drafts."""
    tokens: Column
    """Tokens that such a round brings."""
    round_s: Column


@dataclass(slots=True)
class Simulation:
    day: Day
    _estimator: SavingEstimator = field(default_factory=SavingEstimator)
    _plan: Plan = field(default_factory=Plan)
    _sizing: Sizing = field(default_factory=Sizing)
    _class: Column = field(init=False)
    """[tenants, drafts]: the class of acceptance."""
    _keys: list[EvidenceKey] = field(init=False)
    _targets: int = 1

    def __post_init__(self) -> None:
        drafts = self.day.drafts
        acceptance = np.stack([draft.acceptance for draft in drafts], axis=1)
        self._class = np.minimum((acceptance * _CLASSES).astype(int), _CLASSES - 1)
        tenants = range(len(self.day.weights))
        self._keys = [EvidenceKey(f"tenant-{number}", _MODEL, draft.name) for number in tenants for draft in drafts]
        self._estimator.expect(self._keys)

    def run(self) -> Iterator[Hour]:
        for number, rate in enumerate(self.day.rates):
            yield self._hour(number * _HOUR_S, rate)

    def _hour(self, start_s: float, rate: float) -> Hour:
        day = self.day
        plain = self._fewest(rate, np.zeros((_CLASSES, len(day.drafts))))
        for turn in range(_PLANS):
            self._targets = self._fewest(rate, self._mass)
            self._replan(start_s + turn * _HOUR_S / _PLANS, rate)
        mass = self._mass
        self._targets = targets = self._fewest(rate, mass)
        workers = self._workers(start_s, rate, self._load(rate / targets, mass), mass)
        cost = targets * day.target_price + sum(workers[draft.name] * draft.price for draft in day.drafts)
        token_s = self._load(rate / plain, mass).token_s
        return Hour(rate, plain, targets, workers, float(mass.sum()), token_s, cost, plain * day.target_price)

    @property
    def _mass(self) -> Column:
        """[classes, drafts]: the part of all tokens whose requests have that draft, and this class of acceptance."""
        tokens, drafts = self.day.weights[:, None] * self._shares, range(len(self.day.drafts))
        counted = [np.bincount(self._class[:, n], weights=tokens[:, n], minlength=_CLASSES) for n in drafts]
        return np.stack(counted, axis=1)

    def _of_tenants(self, column: Column) -> Column:
        """[tenants, drafts], from a column by class."""
        return np.take_along_axis(column, self._class, axis=0)

    @property
    def _shares(self) -> Column:
        """[tenants, drafts], of each tenant's requests."""
        if not len(self._plan.share):
            return np.zeros(self._class.shape)
        return np.asarray(self._plan.share.reshape(self._class.shape))

    def _replan(self, now_s: float, rate: float) -> None:
        load = self._load(rate / self._targets, self._mass)
        self._estimator.learn(self._evidence(load, rate))
        fleet = {_MODEL: TargetState(frozenset(draft.name for draft in self.day.drafts), load.price)}
        self._plan = plan(self._estimator, {}, fleet, self._plan, now_s)

    def _evidence(self, load: _Load, rate: float) -> dict[EvidenceKey, Evidence]:
        """What the rounds of the time since the last plan saved."""
        tokens, num = self._of_tenants(load.tokens), self._of_tenants(load.num_drafted)
        made = self._shares * self.day.weights[:, None] * rate * _HOUR_S / _PLANS / tokens
        # More evidence of a tenant would only replace it.
        rounds = np.minimum(made, tuning.HALF_LIFE_ROUNDS)
        saved = tokens - self._of_tenants(load.round_s) / load.step_s
        squares, accepted = rounds * (saved * saved + tuning.MIN_VARIANCE), rounds * (tokens - 1)
        columns = [rounds, rounds * tokens, rounds * saved, squares, rounds * num, accepted]
        rows = zip(self._keys, *(column.ravel().tolist() for column in columns), strict=True)
        return {
            key: Evidence(each, brought, total, square, verified=verified, accepted=taken)
            for key, each, brought, total, square, verified, taken in rows
            if each >= 1
        }

    def _load(self, rate: float, mass: Column) -> _Load:
        """`rate`: tokens per second of one target. Steps get longer until they bring as many tokens as come."""
        target, plain = self.day.target, 1 - float(mass.sum())
        sequences, price, step_s = 1.0, 0.0, target.step_s(1, 1)
        for _ in range(_TURNS):
            before = sequences
            num, tokens = self._drafted(price, step_s)
            rows = sequences * (1 + float((mass * num).sum()))
            step_s = target.step_s(sequences, rows)
            round_s = self._round_s(step_s, num)
            # Of a token, and of a sequence in a step: each takes part in a step once in its round.
            token_s = plain * step_s + float((mass * round_s / tokens).sum())
            price = (target.step_s(sequences, rows + 1) - step_s) / step_s * rate * step_s
            # Little's law.
            sequences = 0.5 * sequences + 0.5 * max(1.0, rate * token_s)
            if sequences > 2 * self.day.most_sequences or abs(sequences - before) < _CLOSE * before:
                break
        fits = sequences <= self.day.most_sequences
        return _Load(step_s, price, token_s if fits else np.inf, num, tokens, round_s)

    def _drafted(self, price: float, step_s: float) -> tuple[Column, Column]:
        """How many tokens a round drafts, and what it brings: so far that a row is worth its price and a round its
        time."""
        chance, brings = np.ones((_CLASSES, len(self.day.drafts))), np.ones((_CLASSES, len(self.day.drafts)))
        num, tokens, rate = np.zeros_like(chance), brings, brings / step_s
        for depth in range(1, self.day.most_draft_tokens + 1):
            chance = chance * _ACCEPTANCE
            brings = brings + chance
            found = brings / self._round_s(step_s, np.full_like(chance, depth))
            # The first token is drafted whatever it saves: what it saves is what the plan learns.
            better = (found > rate) & (chance >= price) | (depth == 1)
            num, tokens = np.where(better, depth, num), np.where(better, brings, tokens)
            rate = np.where(better, found, rate)
        return num, tokens

    def _round_s(self, step_s: float, num: Column) -> Column:
        """Where all of a proposal was right, the next one is ready with the step, as if the draft ran ahead; it does
        not."""
        forward_s = np.array([draft.forward_s for draft in self.day.drafts])
        takes_s = num * forward_s + self.day.round_trip_s
        right = _ACCEPTANCE**num
        return np.asarray(step_s + (1 - right) * takes_s + right * np.maximum(0.0, takes_s - step_s))

    def _fewest(self, rate: float, mass: Column) -> int:
        """The fewest targets on which a token takes no longer than is promised. Raises ValueError if there are none."""
        high = 1
        while self._load(rate / high, mass).token_s > self.day.token_s:
            high *= 2
            if high > _MAX_TARGETS:
                raise ValueError(f"token_s: {self.day.token_s} is less than a step of the target takes alone")
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._load(rate / middle, mass).token_s <= self.day.token_s:
                high = middle
            else:
                low = middle
        return high

    def _workers(self, now_s: float, rate: float, load: _Load, mass: Column) -> dict[str, int]:
        """As many as the control plane would want."""
        forwards = (mass * rate / load.tokens * load.num_drafted).sum(axis=0)
        seen = {}
        for draft, wanted in zip(self.day.drafts, forwards, strict=True):
            busy_s = float(wanted) * draft.forward_s / draft.batch
            workers = max(1, int(np.ceil(busy_s)))
            seen[draft.name] = Utilisation(workers, busy_s / workers)
        self._sizing = sizing(seen, Utilisation(1, 0.0), self._sizing, now_s)
        return {name: one.workers for name, one in self._sizing.drafts.items()}
