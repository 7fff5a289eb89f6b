"""A connected target worker and draft worker in virtual time: one thread, no network.

Workers, drafter, engines and messages are the shipped ones. Only clock and connections are simulated, so late messages
are late again in the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.draft import wire as draft_wire
from outrider.draft.events import DraftReport
from outrider.drafters import ModelConfig, ModelDrafter
from outrider.drafting.pool.sequence import commit_message
from outrider.drafting.pool.validator import DraftValidator, DraftVocabulary
from outrider.drafting.source import DraftSource
from outrider.engine import Engine
from outrider.rpc.v1 import draft_pb2, sequence_pb2, target_pb2
from outrider.sequence.key import Finish, SequenceKey
from outrider.sim.stack import RowPrice, VirtualDraft, fail, limits_of, run_until, simulate, target_worker
from outrider.sim.worker import Processor, VirtualSteps
from outrider.target.requests import wire as target_wire
from outrider.target.requests.events import Offered
from outrider.target.requests.report import TargetReport, TargetStats

_STREAM, _MAX_SEQUENCES, _MAX_DRAFT_TOKENS = 1, 64, 8
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
    row_price: RowPrice = lambda cost: cost.price
    """Price of a drafted row, called for each target step."""
    sources: Sequence[DraftSource] = ()
    """Those of the target's own process."""

    def answer(self, opening: sequence_pb2.OpenSequence) -> tuple[list[int], TargetStats]:
        """The tokens, and the target's counters. Raises a worker's error."""
        return simulate(_answer(self, opening))


async def _answer(pair: TimedPair, opening: sequence_pb2.OpenSequence) -> tuple[list[int], TargetStats]:
    loop, key = asyncio.get_running_loop(), SequenceKey(_STREAM, opening.sequence_id)
    on_target, on_draft = Processor(loop.time), Processor(loop.time)
    engine = pair.target(lambda: on_target.spend(pair.step_s()))
    drafter = ModelDrafter(pair.draft(lambda: on_draft.spend(pair.forward_s())), pair.drafting)
    info, tokens, ended = engine.info, list[int](), loop.create_future()
    limits = limits_of(info, _MAX_SEQUENCES)
    proposals = draft_wire.ProposalLimits(info.max_context_len, _MAX_DRAFT_TOKENS)
    vocabulary = DraftVocabulary(info.vocab_size, info.max_context_len)
    validator = DraftValidator(target_wire.spec_of(opening, limits), vocabulary, opening.speculation.max_draft_tokens)

    def committed(report: TargetReport) -> None:
        for failed in report.failures:
            raise failed.error
        for row in report.commits:
            tokens.extend(row.token_ids)
            if row.finish is not Finish.NONE:
                ended.set_result(None)
            tell(draft_pb2.DraftRequest(commits=[commit_message(opening.sequence_id, row.base_len, row.token_ids)]))

    def tell(request: draft_pb2.DraftRequest) -> None:
        draft.tell(lambda now_s: draft_wire.events_of(request, _STREAM, proposals, now_s))

    def answers(report: DraftReport) -> Iterable[draft_pb2.DraftResponse]:
        return draft_wire.responses_of(report, loop.time()).values()

    def received(response: draft_pb2.DraftResponse) -> None:
        verifying.post([Offered(key, validator.tree(one), loop.time()) for one in response.drafts])

    target = target_worker(
        *(engine, limits, on_target.clock, pair.sources),
        max_batch_tokens=pair.max_batch_tokens,
        row_price=pair.row_price,
    )
    verifying = VirtualSteps(target, committed, on_target, fail)
    draft = VirtualDraft(drafter, _MAX_SEQUENCES, on_draft, pair.delay_s, answers, received)
    verifying.post(target_wire.events_of(target_pb2.VerifyRequest(opens=[opening]), _STREAM, limits, loop.time()))
    tell(draft_pb2.DraftRequest(opens=[opening]))
    await run_until(ended, [verifying, draft.steps])
    return tokens, target.stats
