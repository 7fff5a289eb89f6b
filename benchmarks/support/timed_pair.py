"""A connected target worker and draft worker in virtual time: one thread, no network.

Workers, drafter, engines and messages are the shipped ones. Only clock and connections are simulated, so late messages
are late again in the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.draft import wire as draft_wire
from outrider.draft.events import DraftReport
from outrider.draft.worker import DraftWorker
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafting.pool.validator import DraftValidator, DraftVocabulary
from outrider.drafting.source import DraftSource
from outrider.engine import Engine
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.sequence.key import Finish, SequenceKey
from outrider.sim.clock import VirtualLoop, run_virtually
from outrider.sim.worker import Processor, VirtualSteps, Wire
from outrider.target.requests import wire as target_wire
from outrider.target.requests.events import Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.step.own_engine import OwnEngine
from outrider.target.step.scheduler import Batching
from outrider.target.step.worker import TargetWorker
from outrider.worker.step_cost import StepCost

_STREAM, _MAX_DRAFT_TOKENS = 1, 8
MakeEngine = Callable[[Callable[[], None]], Engine]
"""Of what it calls before each forward."""


@dataclass(frozen=True, slots=True)
class TimedPair:
    """The functions are called for each duration, in virtual seconds."""

    target: MakeEngine
    draft: MakeEngine
    step_s: Callable[[], float]
    forward_s: Callable[[], float]
    """Of the draft."""
    delay_s: Callable[[], float]
    """A message from one worker to the other. Messages keep their order."""
    drafting: ModelConfig = field(default_factory=ModelConfig)
    max_batch_tokens: int = 512
    row_price: Callable[[StepCost], float] = lambda cost: cost.price
    """Price of a drafted row, called for each target step."""
    sources: Sequence[DraftSource] = ()
    """Those of the target's own process."""

    def answer(self, opening: sequence_pb2.OpenSequence) -> tuple[list[int], TargetStats]:
        """The tokens, and the target's counters. Raises a worker's error."""
        return run_virtually(_answer(self, opening), VirtualLoop())


async def _answer(pair: TimedPair, opening: sequence_pb2.OpenSequence) -> tuple[list[int], TargetStats]:
    loop, key = asyncio.get_running_loop(), SequenceKey(_STREAM, opening.sequence_id)
    on_target, on_draft = Processor(loop.time), Processor(loop.time)
    target = pair.target(lambda: on_target.spend(pair.step_s()))
    draft = pair.draft(lambda: on_draft.spend(pair.forward_s()))
    info, tokens, ended = target.info, list[int](), loop.create_future()
    limits = Limits(info.vocab_size, info.max_context_len, info.block_size, info.num_blocks)
    proposals = draft_wire.ProposalLimits(info.max_context_len, _MAX_DRAFT_TOKENS)
    vocabulary = DraftVocabulary(info.vocab_size, info.max_context_len)
    validator = DraftValidator(target_wire.spec_of(opening, limits), vocabulary, opening.speculation.max_draft_tokens)

    def broken(problem: str, error: Exception) -> None:
        ended.set_exception(error)

    def committed(report: TargetReport) -> None:
        for failed in [*report.failures, *report.refused_drafts]:
            ended.set_exception(failed.error)
        for row in report.commits:
            tokens.extend(row.token_ids)
            if row.finish is not Finish.NONE:
                ended.set_result(None)
            commit = sequence_pb2.Commit(sequence_id=key.sequence_id, base_len=row.base_len, token_ids=row.token_ids)
            to_draft.send(draft_pb2.DraftRequest(commits=[commit]), pair.delay_s())

    def proposed(report: DraftReport) -> None:
        for response in draft_wire.responses_of(report, loop.time()).values():
            for error in response.errors:
                ended.set_exception(RuntimeError(f"the draft failed: {error.reason}"))
            to_target.send(response, pair.delay_s())

    batching = Batching(info.block_size, max_batch_tokens=pair.max_batch_tokens)
    worker = TargetWorker(OwnEngine(target, batching, pair.row_price), limits, on_target.clock, pair.sources)
    drafter = DraftWorker(ModelDrafter(draft, pair.drafting), limits.max_sequences, on_draft.clock)
    verifying, drafting = (
        VirtualSteps(worker, committed, on_target, broken),
        VirtualSteps(drafter, proposed, on_draft, broken),
    )
    to_draft = Wire(lambda asked: drafting.post(draft_wire.events_of(asked, _STREAM, proposals, loop.time())))
    to_target = Wire(
        lambda said: verifying.post([Offered(key, validator.tree(one), loop.time()) for one in said.drafts])
    )
    verifying.post(target_wire.events_of(target_pb2.VerifyRequest(opens=[opening]), _STREAM, limits, loop.time()))
    to_draft.send(draft_pb2.DraftRequest(opens=[opening]), pair.delay_s())
    running = [loop.create_task(steps.run()) for steps in (verifying, drafting)]
    await ended
    for task in running:
        task.cancel()
    return tokens, worker.stats
