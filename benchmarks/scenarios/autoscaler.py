"""python -m benchmarks autoscaler"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from outrider_controller.autoscaler.evidence import Evidence, EvidenceKey
from outrider_controller.autoscaler.plan import TargetState
from outrider_controller.autoscaler.planner import Planner
from outrider_controller.cli.output import json_file_option
from outrider_controller.router.speculation.controller import Window

from benchmarks.report import finish, show, table
from benchmarks.support.virtual_load import FAR, NEAR, Committed, StepLine, Text, run
from benchmarks.support.virtual_plan import planned, swinging

_LINE = StepLine(0.012, 0.0006)
_STREAMS = 8
_SECONDS = 60.0
_SETTLED_S = 5.0
_SHIFT_S, _BACK_S = 20.0, 40.0
_SWINGS_S = (20, 60, 150, 600)
_TENANTS, _VERSIONS, _MODELS = 10_000, 4, 2
_STEPS = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that has a bar."""

    question: str
    value: float
    bar: str
    holds: bool


def at_least(question: str, value: float, bar: float) -> Figure:
    return Figure(question, value, f"≥ {bar:g}", value >= bar)


def at_most(question: str, value: float, bar: float) -> Figure:
    return Figure(question, value, f"≤ {bar:g}", value <= bar)


@click.command("autoscaler")
@json_file_option
def autoscaler(json_file: Path | None) -> int:
    """Is it right about who speculates, and quick to notice that it is wrong?

    In virtual time, with the scheduler, the calibration and the plan that ship: two tenants of whom one is outside the
    draft's domain, a text that shifts to what the draft cannot guess and back, and load that swings about the crossing.
    Then the processor time of a plan for 10,000 tenants.
    """
    figures = [*_two_tenants(), *_shift(), *_swings(), *_plan_time()]
    rows = [
        {"": one.question, "FIGURE": f"{one.value:.3g}", "BAR": one.bar, "HOLDS": "yes" if one.holds else "NO"}
        for one in figures
    ]
    show(table(rows))
    body = {"holds": all(one.holds for one in figures), "figures": [asdict(one) for one in figures]}
    return finish("autoscaler", body, json_file)


def _two_tenants() -> Iterator[Figure]:
    inside, outside = replace(NEAR, tenant="inside"), replace(FAR, tenant="outside")
    texts = [inside, outside] * _STREAMS
    late = dict.fromkeys((inside, outside), 0)

    def watch(done: Committed) -> None:
        if done.at_s >= _SETTLED_S:
            late[done.text] += done.run

    combinations: list[tuple[Text, ...]] = [(), (inside,), (outside,), (inside, outside)]
    best = max(run(_LINE, texts, "on", seconds=_SECONDS, plain=plain).goodput for plain in combinations)
    forced = run(_LINE, texts, "auto", seconds=_SECONDS, plain=(outside,))
    auto = run(_LINE, texts, "auto", seconds=_SECONDS, watch=watch)
    yield at_least("two tenants: tokens/s / the best of four ways to put each on or off", auto.goodput / best, 1)
    kept = auto.tokens[inside] / auto.seconds / (forced.tokens[inside] / forced.seconds)
    yield at_least("the one inside the draft's domain / itself with the other one off", kept, 0.97)
    yield at_most("rows verified after 5 s, outside / inside", late[outside] / late[inside], 0.1)


def _shift() -> Iterator[Figure]:
    """Figures of a shift in one stream's text."""
    shifting, seen = replace(NEAR, tenant="shifting", lost_s=(_SHIFT_S, _BACK_S)), list[Committed]()
    texts = [shifting, *[NEAR] * (_STREAMS - 1)]

    def watch(done: Committed) -> None:
        if done.text is shifting:
            seen.append(done)

    run(_LINE, texts, "auto", seconds=_SECONDS, answer_tokens=1 << 17, watch=watch)
    lost = [done for done in seen if _SHIFT_S <= done.at_s < _BACK_S]
    priced_out = next(number for number, done in enumerate(lost) if not done.run)
    yield at_most("text shifts: tokens verified until no row is", _verified(lost[:priced_out]), 60)
    window = Window()
    alarmed = next(n for n, done in enumerate(seen) if window.add(done.verified, done.accepted) and done in lost)
    shifted = [done for done in seen[: alarmed + 1] if done.at_s >= _SHIFT_S]
    yield at_most("tokens verified until the event", _verified(shifted), 200)
    usual = _tokens_per_s(seen, _SHIFT_S - 10, 10)
    seconds = int(_SECONDS - _BACK_S)
    back = next((s for s in range(seconds) if _tokens_per_s(seen, _BACK_S + s, 2) >= 0.9 * usual), seconds)
    yield at_most("it shifts back: seconds until 0.9 of the speed before", back, 10)


def _verified(rounds: list[Committed]) -> int:
    return sum(done.verified for done in rounds)


def _tokens_per_s(rounds: list[Committed], since_s: float, seconds: float) -> float:
    return sum(done.tokens for done in rounds if since_s <= done.at_s < since_s + seconds) / seconds


def _swings() -> Iterator[Figure]:
    """Figures of swings around the crossing, ten minutes each."""
    ran = [planned(swinging(period_s), 600, streams=_STREAMS, seed=seed) for period_s in _SWINGS_S for seed in range(3)]
    yield at_most("load ±10 % about the crossing: most changes of mode in 10 min", max(one.changes for one in ran), 2)
    yield at_least("tokens / the better of always and never, at worst", min(one.of_best for one in ran), 0.99)


def _plan_time() -> Iterator[Figure]:
    chance, planner = random.Random(1), Planner()
    versions, models = [f"draft@{n}" for n in range(_VERSIONS)], [f"model {n}" for n in range(_MODELS)]
    fleet = {model: TargetState(frozenset(versions)) for model in models}
    keys = [EvidenceKey(f"tenant {n}", m, v) for n in range(_TENANTS) for m in models for v in versions]
    planner.learn({key: Evidence(200, 440, chance.gauss(100, 100), 500) for key in keys})
    took = []
    for second in range(_STEPS):
        planner.learn({one: Evidence(30, 66, chance.gauss(15, 15), 75) for one in chance.sample(keys, 5000)})
        started_s = time.process_time()
        planner.step({}, fleet, float(second))
        took.append(time.process_time() - started_s)
    what = "a plan for 10,000 tenants × 4 versions × 2 models, seconds of processor time:"
    yield at_most(f"{what} the first", took[0], 0.5)
    yield at_most(f"{what} later ones", statistics.median(took[1:]), 0.5)
