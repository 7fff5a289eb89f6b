"""What a simulation is made of: an error of any part of it ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from outrider.errors import InvalidRequest
from outrider.sim.stack import run_until, simulate
from outrider.sim.worker import Processor, VirtualSteps
from outrider.worker.events import Load

from benchmarks.support import timed_pair
from benchmarks.support.pair_distribution import Conditions, run_pair_experiment


class Idle:
    """A worker that has nothing to do, and reports it."""

    load = Load()

    def apply(self, event: object) -> None: ...

    def step(self) -> float | None:
        return None

    def take_report(self) -> str:
        return "a report"


def test_a_report_that_nobody_can_take_ends_the_simulation() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        steps = VirtualSteps(Idle(), refuse, Processor(loop.time))  # type: ignore[arg-type]
        steps.post([object()])
        await run_until(asyncio.sleep(10.0), [steps])

    def refuse(report: object) -> None:
        raise LookupError(report)

    with pytest.raises(LookupError, match="a report"):
        simulate(main())


def test_what_a_message_breaks_on_its_arrival_is_raised() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, [].pop)
        await asyncio.sleep(2.0)

    with pytest.raises(RuntimeError, match="pop from empty list"):
        simulate(main())


def test_a_draft_that_its_target_refuses_ends_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else drafts that no target takes would pass for drafts that are never accepted."""

    class Refusing(timed_pair.DraftValidator):
        def tree(self, draft: Any) -> Any:
            raise InvalidRequest("draft", "no")

    monkeypatch.setattr(timed_pair, "DraftValidator", Refusing)
    with pytest.raises(RuntimeError, match="InvalidRequest"):
        run_pair_experiment(draws=10, conditions=Conditions.ANY)
