"""Our own engine as a target's: steps are planned, run and verified.

Only it commits tokens to its sequences.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from outrider.engine import Engine, OutOfBlocks
from outrider.engine.models.taps import HEAD_INPUT
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.limits import Limits
from outrider.target.requests.times import Timer
from outrider.target.step.port import Capabilities, EngineRoom, EngineStep
from outrider.target.step.scheduler import Batching, StepPlan, TargetRow, admissible, plan
from outrider.target.step.sequence import PromptReport, TargetSequence
from outrider.target.step.verify import kv_of, verify_rows
from outrider.worker.events import Opened
from outrider.worker.faults import check_engine
from outrider.worker.step_cost import StepCost
from outrider.worker.watchdog import MIN_ON_GPU_S, MIN_S, StepPace

log = logging.getLogger(__name__)

_NO_PROMPT = PromptReport()


class OwnEngine:
    """The engine, and what of a step is planned for it."""

    def __init__(
        self, engine: Engine, batching: Batching, row_price: Callable[[StepCost], float] = lambda cost: cost.price
    ) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs."""
        on_cpu = engine.info.device == "cpu"
        self.capabilities = Capabilities(StepPace(batching.max_batch_tokens, MIN_S if on_cpu else MIN_ON_GPU_S))
        self.num_preemptions = 0
        self._engine = engine
        self._batching = batching
        self._row_price = row_price
        self._serials = itertools.count()
        self._num_running = 0

    @property
    def row_price(self) -> float:
        return self._row_price(self.capabilities.cost)

    def deepen(self, speculation: Speculation) -> Speculation:
        return speculation

    def open(self, event: Opened, drafts: SequenceDrafts, limits: Limits) -> TargetSequence:
        timer, serial = Timer(event.received_s), next(self._serials)
        return TargetSequence(event.key, serial, event.spec, limits.max_context_len, timer, drafts)

    def room(self) -> EngineRoom:
        return EngineRoom(self._num_running, self._engine.kv.num_free_blocks)

    def prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._engine.kv.take_prefix_changes()

    def drop_prefixes(self) -> None:
        self._engine.kv.drop_prefixes()

    def run(self, sequences: Iterable[TargetSequence], now_s: float, taps: tuple[int, ...] | None) -> EngineStep:
        planned = self._plan(list(sequences), now_s)
        for sequence, until_s in planned.held:
            sequence.timer.held_until_s = until_s
        if not planned.rows:
            return EngineStep(wake_at_s=planned.wake_at_s)
        try:
            verify_rows(self._engine, planned.rows, () if taps is None else taps or (HEAD_INPUT,))
        except OutOfBlocks as error:
            # The plan and the pool disagree. Preempting the newest sequence is always safe.
            log.error("planned a step that does not fit: %s", error)
            self._recover(planned.rows)
            return EngineStep()
        if all(row.raised for row in planned.rows):
            check_engine(self._engine.check)
        for row in planned.rows:
            try:
                self._finish(row)
            except Exception as error:
                row.error = error
            if row.error is not None:
                self._engine.kv.discard(kv_of(row.sequence))
                self._released(row.sequence)
        return EngineStep(planned.rows)

    def _plan(self, sequences: Sequence[TargetSequence], now_s: float) -> StepPlan:
        engine, batching, known = self._engine, self._batching, self.capabilities
        self._admit(sequences)
        pricing = Pricing(self.row_price, known.calibration, engine.num_free_tokens)
        while True:
            planned = plan(sequences, batching, engine.kv.num_free_blocks, now_s, pricing)
            if planned.victim is None:
                return planned
            self.preempt(planned.victim)

    def _admit(self, sequences: Sequence[TargetSequence]) -> None:
        """Gives KV to those that wait for it, as far as all that have it can finish their prefill."""
        for sequence in admissible(sequences, self._batching, self._engine.kv.num_free_blocks):
            # Cached tokens have no logits, so the prefix cache is not used.
            cached = () if sequence.wants_prompt_logprobs else sequence.tokens
            sequence.kv = self._engine.kv.open(cached, sequence.spec.salt)
            self._num_running += 1
            report = sequence.prompt_report
            if report is not None and report.num_cached_tokens is None:
                report.num_cached_tokens = min(sequence.cached_len, len(sequence.spec.prompt))

    def preempt(self, victim: TargetSequence) -> None:
        """Releases the victim's KV. It keeps its tokens, and is later recomputed from what the prefix cache has
        then."""
        if victim.kv is not None:
            self.close(victim)
            self.num_preemptions += 1

    def _recover(self, rows: Sequence[TargetRow]) -> None:
        for row in rows:
            if row.sequence.kv is not None:
                self._engine.kv.rewind(row.sequence.kv, row.sequence.committed_len - 1)
        self.preempt(max((row.sequence for row in rows), key=lambda s: s.serial))

    def _finish(self, row: TargetRow) -> None:
        """What a verified row commits, and the states of its committed positions."""
        sequence = row.sequence
        if row.token_ids:
            row.until_end(sequence.spec.stop_token_ids, sequence.remaining)
            # Before blocks are published or tokens sent: rejected tokens must not be found in the cache, and the last
            # committed one is not in it yet.
            self._engine.kv.keep(kv_of(sequence), row.accepted[: len(row.token_ids) - 1])
            prompt = sequence.prompt_report or _NO_PROMPT
            row.num_prompt_tokens, row.num_cached_tokens = prompt.num_tokens, prompt.num_cached_tokens or 0
            row.prompt_logprobs, row.top = prompt.logprobs, row.top[: len(row.token_ids)]
        if row.states is not None:
            row.states = None if row.decides and not row.token_ids else _committed(row.states, row)

    def follow(self, row: TargetRow) -> None:
        sequence = row.sequence
        if row.token_ids:
            sequence.commit(row.token_ids)
        self._engine.kv.publish(kv_of(sequence), sequence.committed_len)

    def close(self, sequence: TargetSequence) -> None:
        if sequence.kv is not None:
            self._engine.kv.close(sequence.kv)
            self._released(sequence)

    def _released(self, sequence: TargetSequence) -> None:
        sequence.kv = None
        self._num_running -= 1


def _committed(states: Tensor, row: TargetRow) -> Tensor:
    """Of the states of all that the row ran. A view where these are the first ones."""
    end = row.num_tokens + len(row.accepted)
    if tuple(row.accepted) != tuple(range(len(row.accepted))):
        return states[[*range(row.num_tokens), *(row.num_tokens + node for node in row.accepted)]]
    return states if end == len(states) else states[:end]
