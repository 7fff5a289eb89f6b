"""What a simulation is made of: the shipped worker of a target, and a draft worker with the ways to it and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from outrider.draft.events import DraftReport, Event
from outrider.draft.worker import DraftWorker
from outrider.drafters import ModelDrafter
from outrider.drafting.source import DraftSource
from outrider.engine import Engine, ModelInfo
from outrider.sim.clock import VirtualLoop, run_virtually
from outrider.sim.worker import Processor, VirtualSteps, Wire
from outrider.target.requests.limits import Limits
from outrider.target.step.own_engine import OwnEngine
from outrider.target.step.scheduler import Batching
from outrider.target.step.worker import TargetWorker
from outrider.worker.step_cost import StepCost

T = TypeVar("T")
RowPrice = Callable[[StepCost], float]
"""As OwnEngine's."""


def limits_of(info: ModelInfo, max_sequences: int) -> Limits:
    return Limits(info.vocab_size, info.max_context_len, info.block_size, info.num_blocks, max_sequences)


def target_worker(
    engine: Engine,
    limits: Limits,
    clock: Callable[[], float],
    sources: Sequence[DraftSource] = (),
    *,
    max_batch_tokens: int = 512,
    row_price: RowPrice = lambda cost: cost.price,
) -> TargetWorker[Any]:
    """`sources`: those of the target's own process."""
    own = OwnEngine(engine, Batching(engine.info.block_size, max_batch_tokens), row_price)
    return TargetWorker(own, limits, clock, sources)


class VirtualDraft:
    """A draft worker in virtual time, and the ways to it and back."""

    def __init__(
        self,
        drafter: ModelDrafter,
        max_sequences: int,
        processor: Processor,
        delay_s: Callable[[], float],
        answers: Callable[[DraftReport], Iterable[Any]],
        receive: Callable[[Any], None],
    ) -> None:
        """`delay_s`: of a message; they keep their order. `answers`: the messages of a report, which are received one
        by one."""
        worker = DraftWorker(drafter, max_sequences, processor.clock)
        self.steps = VirtualSteps(worker, self._reported, processor, end=fail)
        self._delay_s, self._answers = delay_s, answers
        self._loop = asyncio.get_running_loop()
        self._to, self._back = Wire(self._hear), Wire(receive)

    def tell(self, events_at: Callable[[float], Iterable[Event]]) -> None:
        """Sends what becomes events when it is heard, at that time."""
        self._to.send(events_at, self._delay_s())

    def _hear(self, events_at: Callable[[float], Iterable[Event]]) -> None:
        self.steps.post(events_at(self._loop.time()))

    def _reported(self, report: DraftReport) -> None:
        for failed in report.failures:
            raise failed.error
        for answer in self._answers(report):
            self._back.send(answer, self._delay_s())


def fail(problem: str, error: Exception) -> None:
    """Instead of the end of a process."""
    raise error


async def run_until(end: Awaitable[None], workers: Iterable[VirtualSteps]) -> None:
    """Runs the workers' loops until then. Raises what one of them raises."""
    working = [asyncio.ensure_future(each) for each in (end, *(one.run() for one in workers))]
    done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
    for task in working:
        task.cancel()
    for task in done:
        task.result()


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Runs it in virtual time. Raises what nobody took."""
    loop = VirtualLoop()
    found = run_virtually(main, loop)
    if loop.unhandled:
        raise RuntimeError(loop.unhandled[0])
    return found
