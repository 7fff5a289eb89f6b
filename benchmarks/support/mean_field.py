"""A day of many targets and tenants as a mean field: drafts of which kind, what they cost and save. Pure.

Every target has the same mix of tenants. An hour is a fixed point: the load sets the time of a step and the price of a
row, these set how many tokens of each tenant are verified and what that saves, the plan sets who drafts with what, and
that sets the load. Estimates and plan are those that ship; they go from hour to hour.

A target steps without a pause. A sequence whose draft is not there yet misses the steps that begin until it comes, and
the others are in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from outrider.drafting.config import ModelConfig
from outrider.tuning import NEWEST, PATIENCE, USUAL_TOKENS
from outrider_controller.autoscaler import tuning
from outrider_controller.autoscaler.estimator import Column, SavingEstimator
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import Plan, TargetState, plan
from outrider_controller.autoscaler.sizing import Sizing, Utilisation, sizing
from outrider_controller.router import tuning as router
from outrider_controller.router.config import PolicyConfig

from benchmarks.support.machines import Machine

_MODEL = "target"
_HOUR_S = 3600.0
_PLANS = 3
"""Plans of an hour: the first ones see what the others changed."""
_CLASSES = 200
_ACCEPTANCE = ((np.arange(_CLASSES) + 0.5) / _CLASSES)[:, None]
"""Of each class of tenants at a draft."""
_QUANTILES = ((np.arange(10) + 0.5) / 10)[:, None, None]
_LEAST = 1e-9
_TURNS, _CLOSE, _PRICES = 100, 1e-4, 10
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
    """The time of a token that is promised: so many targets run that neither the mean is above it, nor a token without
    a draft."""
    drafts: Sequence[Draft]
    weights: Column
    rates: Sequence[float]
    round_trip_s: float = 0.001
    draft_busy: float = 1.0
    """The chance that a draft worker is in a round when a sequence comes, which then waits for the next one. 1 where
    many sequences share it."""
    most_draft_tokens: int = PolicyConfig().max_draft_tokens
    min_confidence: float = ModelConfig().min_confidence
    max_wait_s: float = PolicyConfig().max_wait_us / 1e6
    most_sequences: int = 256
    """Of a target, for their keys and values."""


@dataclass(frozen=True, slots=True)
class Hour:
    rate: float
    plain_targets: int
    targets: int
    """With drafts."""
    sequences: float
    """Of each of these targets, in a step or waiting for their drafts."""
    step_s: float
    """Of these targets: what a token without a draft takes."""
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
class _Rounds:
    """Of each class with each draft. Columns are [classes, drafts]."""

    num_drafted: Column
    num_verified: Column
    tokens: Column
    """That a round brings."""
    seconds: Column

    def paused(self, step_s: float) -> _Rounds:
        """With the plain rounds of requests that pause their draft, because its rounds cost more than they save."""
        costs = self.tokens * step_s < self.seconds
        share = np.where(costs, router.PRIOR_STEPS / (router.PRIOR_STEPS + USUAL_TOKENS), 1.0)
        return _Rounds(
            share * self.num_drafted,
            share * self.num_verified,
            1 + share * (self.tokens - 1),
            step_s + share * (self.seconds - step_s),
        )


@dataclass(frozen=True, slots=True)
class _Load:
    """The fixed point of one target at a price of a row."""

    step_s: float
    price: float
    rows_cost: bool
    """Whether one more row would make the step longer."""
    token_s: float
    """Mean over tokens; infinite for more sequences than fit."""
    rounds: _Rounds
    """Without pauses: only these are evidence."""


@dataclass(slots=True)
class Simulation:
    day: Day
    _estimator: SavingEstimator = field(default_factory=SavingEstimator)
    _plan: Plan = field(default_factory=Plan)
    _sizing: Sizing = field(default_factory=Sizing)
    _class: Column = field(init=False)
    """[tenants, drafts]: the class of acceptance."""
    _keys: list[EvidenceKey] = field(init=False)

    def __post_init__(self) -> None:
        drafts = self.day.drafts
        acceptance = np.stack([draft.acceptance for draft in drafts], axis=1)
        self._class = np.minimum((acceptance * _CLASSES).astype(int), _CLASSES - 1)
        tenants = range(len(self.day.weights))
        self._keys = [EvidenceKey(f"tenant-{number}", _MODEL, draft.name) for number in tenants for draft in drafts]
        self._estimator.expect(self._keys)

    def run(self) -> Iterator[Hour]:
        """Raises ValueError for a promise that no target can keep."""
        for number, rate in enumerate(self.day.rates):
            yield self._hour(number * _HOUR_S, rate)

    def _hour(self, start_s: float, rate: float) -> Hour:
        day = self.day
        plain = self._fewest(rate, np.zeros((_CLASSES, len(day.drafts))), _MAX_TARGETS)
        if plain == _MAX_TARGETS:
            raise ValueError(f"token_s: {day.token_s} is less than a step of the target takes alone")
        for turn in range(_PLANS):
            # Drafts that are not right may break the promise however many targets run, until the plan turns them off.
            self._replan(start_s + turn * _HOUR_S / _PLANS, rate, self._fewest(rate, self._mass, 2 * plain))
        mass = self._mass
        targets = self._fewest(rate, mass, 2 * plain)
        load = self._load(rate / targets, mass)
        workers = self._workers(start_s, rate, load, mass)
        cost = targets * day.target_price + sum(workers[draft.name] * draft.price for draft in day.drafts)
        return Hour(
            rate=rate,
            plain_targets=plain,
            targets=targets,
            sequences=rate / targets * load.token_s,
            step_s=load.step_s,
            drafts=workers,
            drafting=float(mass.sum()),
            token_s=self._load(rate / plain, mass).token_s,
            cost=cost,
            plain_cost=plain * day.target_price,
        )

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

    def _replan(self, now_s: float, rate: float, targets: int) -> None:
        load = self._load(rate / targets, self._mass)
        self._estimator.learn(self._evidence(load, rate))
        fleet = {_MODEL: TargetState(frozenset(draft.name for draft in self.day.drafts), load.price)}
        self._plan = plan(self._estimator, {}, fleet, self._plan, now_s)

    def _evidence(self, load: _Load, rate: float) -> dict[EvidenceKey, Evidence]:
        """What the rounds of the time since the last plan saved."""
        tokens, num = self._of_tenants(load.rounds.tokens), self._of_tenants(load.rounds.num_verified)
        made = self._shares * self.day.weights[:, None] * rate * _HOUR_S / _PLANS / tokens
        # More evidence of a tenant would only replace it.
        rounds = np.minimum(made, tuning.HALF_LIFE_ROUNDS)
        saved = tokens - self._of_tenants(load.rounds.seconds) / load.step_s
        squares, accepted = rounds * (saved * saved + tuning.MIN_VARIANCE), rounds * (tokens - 1)
        columns = [rounds, rounds * tokens, rounds * saved, squares, rounds * num, accepted]
        rows = zip(self._keys, *(column.ravel().tolist() for column in columns), strict=True)
        return {
            key: Evidence(each, brought, total, square, verified=verified, accepted=taken)
            for key, each, brought, total, square, verified, taken in rows
            if each >= 1
        }

    def _load(self, rate: float, mass: Column) -> _Load:
        """`rate`: tokens per second of one target. Verifies what is worth its row; where that alone would let a step
        wait for arithmetic, the likeliest rows that it does not wait for."""
        low, high = 0.0, self.day.target.row_s * rate
        free, paid = self._at_price(low, rate, mass), self._at_price(high, rate, mass)
        if not free.rows_cost or paid.rows_cost:
            return paid if free.rows_cost else free
        for _ in range(_PRICES):
            middle = (low + high) / 2
            found = self._at_price(middle, rate, mass)
            low, high, paid = (middle, high, paid) if found.rows_cost else (low, middle, found)
        return paid

    def _at_price(self, price: float, rate: float, mass: Column) -> _Load:
        target, plain, step_s = self.day.target, 1 - float(mass.sum()), self.day.target.step_s(1, 1)
        for _ in range(_TURNS):
            before, drafting = step_s, self._rounds(price, step_s)
            rounds = drafting.paused(step_s)
            # Of each token: a sequence is in one step of its round, and waits for its draft in the others.
            sequences = plain + float((mass / rounds.tokens).sum())
            rows = plain + float((mass * (1 + rounds.num_verified) / rounds.tokens).sum())
            step_s = self._settled(step_s, rate * sequences, rate * rows)
            if abs(step_s - before) < _CLOSE * before:
                break
        token_s = plain * step_s + float((mass * rounds.seconds / rounds.tokens).sum())
        # Little's law.
        fits = rate * token_s <= self.day.most_sequences
        size = rate * sequences * step_s, rate * rows * step_s
        costs = target.step_s(size[0], size[1] + 1) > target.step_s(*size)
        return _Load(step_s, price, costs, token_s if fits else np.inf, drafting)

    def _settled(self, step_s: float, sequences_per_s: float, rows_per_s: float) -> float:
        """Steps get longer until they bring as many tokens as come, or hold more sequences than fit."""
        target, before = self.day.target, 0.0
        while abs(step_s - before) > _CLOSE / 10 * step_s and sequences_per_s * step_s < 2 * self.day.most_sequences:
            before = step_s
            longer_s = target.step_s(max(1.0, sequences_per_s * step_s), max(1.0, rows_per_s * step_s))
            step_s = 0.5 * step_s + 0.5 * longer_s
        return step_s

    def _rounds(self, price: float, step_s: float) -> _Rounds:
        """As workers and router decide them."""
        day, shape = self.day, (_CLASSES, len(self.day.drafts))
        # A proposal ends with the token that makes all of it too unlikely.
        num_drafted = np.minimum(np.floor(_depth(max(day.min_confidence, price))) + 1, day.most_draft_tokens)
        num_verified = np.minimum(num_drafted, np.floor(_depth(price)))
        tokens = (1 - _ACCEPTANCE ** (num_verified + 1)) / (1 - _ACCEPTANCE)
        forwards_s = num_drafted * np.array([draft.forward_s for draft in day.drafts])
        takes_s = forwards_s + day.round_trip_s
        worth_s = np.minimum(day.max_wait_s, PATIENCE * _expected(tokens - 1) * step_s)
        waits = (num_verified > 0) & (takes_s <= worth_s)
        # The target steps other sequences meanwhile, one step after another.
        queued_s = forwards_s * np.maximum(0.0, 1 - _QUANTILES / max(day.draft_busy, 1e-9))
        begun = np.ceil((takes_s + queued_s) / step_s).mean(axis=0)
        return _Rounds(
            np.broadcast_to(num_drafted, shape),
            np.where(waits, num_verified, 0.0),
            np.where(waits, tokens, 1.0),
            step_s * (1 + np.where(waits, begun, 0.0)),
        )

    def _fewest(self, rate: float, mass: Column, most: int) -> int:
        """The fewest targets that keep the promise; `most`, if none do."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            load = self._load(rate / middle, mass)
            if max(load.step_s, load.token_s) <= self.day.token_s:
                high = middle
            else:
                low = middle
        return high

    def _workers(self, now_s: float, rate: float, load: _Load, mass: Column) -> dict[str, int]:
        """As many as the control plane would want, if all that they draft was accepted."""
        rounds = load.rounds.paused(load.step_s)
        forwards = (mass * rate / rounds.tokens * rounds.num_drafted).sum(axis=0)
        seen = {}
        for draft, wanted in zip(self.day.drafts, forwards, strict=True):
            busy_s = float(wanted) * draft.forward_s / draft.batch
            workers = max(1, int(np.ceil(busy_s)))
            seen[draft.name] = Utilisation(workers, busy_s / workers)
        self._sizing = sizing(seen, Utilisation(1, 0.0), self._sizing, now_s)
        return {name: one.workers for name, one in self._sizing.drafts.items()}


def _expected(accepted: Column) -> Column:
    """What a router takes for the tokens that a round accepts: it starts from one, and forgets."""
    rounds = 1 / NEWEST
    return (router.PRIOR_STEPS + rounds * accepted) / (router.PRIOR_STEPS + rounds)


def _depth(chance: float) -> Column:
    """How many tokens of each class are together at least so likely."""
    return np.asarray(np.log(max(chance, _LEAST)) / np.log(_ACCEPTANCE))
