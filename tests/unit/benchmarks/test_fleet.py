"""The mean field of a fleet agrees with arithmetic, and with the shipped workers and plan in virtual time. Its plan
turns off what does not pay.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from outrider.draft.events import DraftCommitted, DraftOpened, DraftReport
from outrider.draft.worker import DraftWorker
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafting.source import DraftLimits
from outrider.speculation import SamplingParams, VerificationMode
from outrider.target.requests.opening import Opening, Stopping
from outrider.worker.events import SequenceKey
from outrider_controller.whatif.engine import Clock, KnownEngine, draft_says
from outrider_controller.whatif.loop import Loop, Process
from outrider_controller.whatif.stack import Setup, Times, VirtualStack
from outrider_controller.whatif.texts import Text, Texts

from benchmarks.scenarios.fleet import a_day
from benchmarks.support.machines import H100, LLAMA_1B, LLAMA_8B, LLAMA_70B, Machine
from benchmarks.support.mean_field import Day, Draft, Simulation

TARGET = Machine(LLAMA_70B, H100, 4)


def day(acceptance: float, *, rate: float = 600_000.0, tenants: int = 40, hours: int = 3) -> Day:
    return Day(
        target=TARGET,
        target_price=10.0,
        token_s=0.020,
        drafts=[Draft("1B", Machine(LLAMA_1B, H100), 2.5, np.full(tenants, acceptance), batch=64)],
        weights=np.full(tenants, 1 / tenants),
        rates=[rate] * hours,
    )


def test_a_step_that_waits_for_memory_reads_the_weights() -> None:
    machine = Machine(LLAMA_8B, H100, context=0)
    assert machine.step_s(1, 1) == pytest.approx(2 * 8.03e9 / (0.75 * 3.35e12) + 32 * 5e-6)
    assert machine.step_s(1, 1 + machine.num_free(1, 1)) == machine.step_s(1, 1)
    assert machine.step_s(1, 400) > machine.step_s(1, 1)


def test_plain_targets_are_as_many_as_keep_the_promise() -> None:
    hour = next(Simulation(day(0.0)).run())
    # A target of n sequences brings n tokens in each step; n + 1 would take longer than is promised, or not fit.
    each = 600_000 / hour.plain_targets
    fits = max(n for n in range(1, 257) if TARGET.step_s(n, n) <= 0.020)
    assert each == pytest.approx(fits / TARGET.step_s(fits, fits), rel=0.03)


def test_drafts_that_are_never_right_are_only_tried() -> None:
    *_, last = Simulation(day(0.01)).run()
    assert 0 < last.drafting < 0.1
    # A plan lets trials cost a hundredth of the time.
    assert last.token_s <= 1.015 * 0.020


def test_drafts_that_are_right_save_targets_and_more_so_the_better_they_are() -> None:
    good, better = ([*Simulation(day(acceptance)).run()][-1] for acceptance in (0.6, 0.85))
    assert good.drafting > 0.9
    assert better.targets < good.targets < good.plain_targets
    assert better.saving > good.saving > 0
    assert good.cost == good.targets * 10.0 + good.drafts["1B"] * 2.5


RIGHT, WRONG = 7, 8


def texts(tenants: list[float]) -> Texts:
    """Each tenant's draft is right as often as it says that it is."""
    chance, made = random.Random(3), []
    for number in range(40 * len(tenants)):
        share = tenants[number % len(tenants)]
        guesses = [((RIGHT if chance.random() < share else WRONG, share),) for _ in range(240)]
        made.append(Text([1] * 12, [RIGHT] * 240, guesses, tenant=f"tenant-{number % len(tenants)}"))
    return Texts(made, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tenants", "token_s", "round_trip_s"),
    [
        ([0.02] * 6, 0.020, 0.001),
        ([0.6] * 6, 0.020, 0.001),
        ([0.9] * 6, 0.018, 0.005),
        ([0.85, 0.85, 0.5, 0.5, 0.5, 0.7], 0.018, 0.001),
    ],
)
def test_a_target_brings_what_the_shipped_one_does_in_virtual_time(
    tenants: list[float], token_s: float, round_trip_s: float
) -> None:
    draft = Draft("1B", Machine(LLAMA_1B, H100), 2.5, np.array(tenants), batch=64)
    # A draft worker of its own that has answered before the target's next step ends is free whenever a sequence comes.
    *_, hour = Simulation(
        replace(
            day(0.5, tenants=len(tenants), hours=4),
            drafts=[draft],
            token_s=token_s,
            round_trip_s=round_trip_s,
            draft_busy=0.0,
        )
    ).run()
    times = Times(
        target=lambda sequences, rows, tokens: TARGET.step_s(sequences, rows),
        draft=lambda sequences, rows, tokens: draft.forward_s,
        one_way_s=round_trip_s / 2,
        between_s=0.0,
        num_free=TARGET.num_free,
    )
    setup = Setup(times, round(hour.sequences), drafting=ModelConfig(num_alternatives=0))
    ran = VirtualStack(texts(tenants), setup).run(2.0, 2.0)
    assert hour.rate / hour.targets == pytest.approx(ran.tokens_per_s, rel=0.1)


def test_a_draft_worker_that_many_share_answers_after_a_round_and_a_half() -> None:
    loop, clock, chance, forward_s = Loop(), Clock(), random.Random(1), 0.002
    known = Texts([Text([1] * 12, [RIGHT] * 400, [((WRONG, 0.9),)] * 400)], 64)
    engine = KnownEngine(known, draft_says, lambda sequences, rows, tokens: forward_s, clock)
    asked_s, took_s = dict[SequenceKey, float](), list[float]()

    def commit(key: SequenceKey, length: int) -> None:
        asked_s[key] = loop.now_s
        draft.deliver(loop.now_s, DraftCommitted(key, length, (RIGHT,), False, loop.now_s))

    def proposed(report: DraftReport) -> None:
        for one in report.proposals:
            assert len(one.tree) == 5
            if one.key in asked_s:
                took_s.append(loop.now_s - asked_s[one.key])
            # The target steps, and the next commit comes at any time.
            later_s = loop.now_s + chance.expovariate(1 / 0.04)
            loop.at(later_s, lambda one=one: commit(one.key, one.tree.base_len))  # type: ignore[misc]

    draft = Process(
        loop, DraftWorker(ModelDrafter(engine, ModelConfig(num_alternatives=0)), 4096, clock), clock, proposed
    )
    opening = Opening(
        known.prompt(0),
        SamplingParams(temperature=0.0),
        VerificationMode.GREEDY,
        Stopping(400),
        request_id="r",
        tenant="t",
    ).for_drafts(DraftLimits(5))
    for number in range(64):
        draft.deliver(0.0, DraftOpened(SequenceKey(1, number), opening, 0.0))
    loop.run(3.0)
    assert np.mean(took_s) == pytest.approx(1.5 * 5 * forward_s, rel=0.05)


def test_a_promise_that_no_target_can_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="token_s"):
        next(Simulation(replace(day(0.5), token_s=0.001)).run())


def test_the_fleet_of_the_benchmark_needs_its_targets_at_the_peak() -> None:
    day = a_day(100, 50, 0.020, 2.5, 0.6)
    # Targets without drafts are as many as the hour's rate needs, whatever came before.
    (peak,) = Simulation(replace(day, rates=[max(day.rates)])).run()
    assert peak.plain_targets == pytest.approx(100, abs=3)
