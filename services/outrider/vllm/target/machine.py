"""vLLM as a target's engine.

vLLM schedules, runs, samples and stops; here its results become commits. A fault of vLLM itself ends every sequence, so
that routers continue them elsewhere, and this worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.v1.engine.core import EngineCore

from outrider.errors import Unavailable
from outrider.sequence.speculation import Speculation
from outrider.speculation import Grammar
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.limits import Limits
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer
from outrider.target.step.port import Capabilities, EngineRoom, EngineStep
from outrider.vllm.drafts import NOTHING, ChainRow, DraftBook, beyond_a_step
from outrider.vllm.features import sent_features
from outrider.vllm.target.grammar import MaskedGrammar
from outrider.vllm.target.opening import check_supported, request_of
from outrider.vllm.target.sequence import FINISHES, VllmSequence
from outrider.worker.events import Opened
from outrider.worker.watchdog import MIN_ON_GPU_S, StepPace

_PAUSE_S = 0.005
"""After a step in which vLLM could run nothing."""


class VllmEngine:
    """vLLM's engine, and the sequences that it knows, by request."""

    def __init__(self, core: EngineCore, on_broken: Callable[[], None] = lambda: None) -> None:
        """`on_broken` is called when vLLM's engine has failed: it cannot be used again."""
        self.scheduler_stats: Any = None
        """vLLM's own, of the last step that had any."""
        self._core = core
        self._scheduler = core.scheduler
        self._book: DraftBook = core.scheduler.book
        self._on_broken = on_broken
        self._running: dict[str, VllmSequence] = {}
        # On a CPU too: the model runs in other processes, which may be starved while this one is not.
        pace = StepPace(core.scheduler.max_num_scheduled_tokens, MIN_ON_GPU_S)
        # The scheduler measures steps, because it may run without a target.
        self.capabilities = Capabilities(
            pace, plans_ahead=True, cost=self._book.cost, calibration=self._book.calibration
        )

    @property
    def num_preemptions(self) -> int:
        count: int = self._scheduler.num_preemptions
        return count

    @property
    def row_price(self) -> float:
        return self._book.row_price

    def deepen(self, speculation: Speculation) -> Speculation:
        return beyond_a_step(speculation)

    def room(self) -> EngineRoom:
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return EngineRoom(len(self._scheduler.running), free)

    def prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        added, removed = self._scheduler.kv_event_publisher.take()
        return added, removed

    def drop_prefixes(self) -> None:
        """Tenants have salts."""

    def open(self, event: Opened, drafts: SequenceDrafts, limits: Limits) -> VllmSequence:
        check_supported(event.spec)
        return VllmSequence(event.key, event.spec, Timer(event.received_s), drafts, partial(self._begin, limits))

    def _begin(self, limits: Limits, sequence: VllmSequence, grammar: Grammar | None) -> None:
        """From here on vLLM runs it."""
        spec, hasher = sequence.spec, self._core.request_block_hasher
        sequence.request = request_of(sequence.request_id, spec, sequence.drafts.tokens, limits, hasher)
        if grammar is not None:
            sequence.grammar = MaskedGrammar(grammar)
            sequence.request.structured_output_request.grammar = sequence.grammar
            sequence.drafts.num_possible = sequence.grammar.num_possible
        self._core.add_request(sequence.request)
        self._running[sequence.request_id] = sequence
        self._book.open(sequence.request_id, sequence.drafts)

    def close(self, sequence: VllmSequence) -> None:
        self._running.pop(sequence.request_id, None)
        self._book.close(sequence.request_id)
        # Nothing happens when vLLM has ended it already.
        self._core.abort_requests([sequence.request_id])

    def run(self, sequences: Iterable[VllmSequence], now_s: float, taps: tuple[int, ...] | None) -> EngineStep:
        """Raises Unavailable when vLLM's engine has failed."""
        if not (self._scheduler.has_requests() or self._core.batch_queue):
            return EngineStep(wake_at_s=None)
        # The device is busy: a draft that comes now is verified a step earlier.
        if (until_s := self._scheduler.plan_by_s) > time.monotonic() and self._owed_drafts():
            return EngineStep(wake_at_s=until_s)
        try:
            outputs, ran = self._core.step_fn()
            self._core.post_step(ran)
        except Exception as error:
            self._on_broken()
            raise Unavailable(f"vLLM's engine failed: {type(error).__name__}") from error
        # With asynchronous scheduling a step is scheduled before the one that it follows has ended.
        if outputs is not None and self._scheduler.step.counts:
            return EngineStep(self._rows(outputs), seconds=self._scheduler.step.seconds)
        if ran:
            return EngineStep()
        return EngineStep(wake_at_s=time.monotonic() + _PAUSE_S if self._scheduler.has_requests() else None)

    def _owed_drafts(self) -> bool:
        return any(sequence.drafts.owed for sequence in self._running.values())

    # -- results of a step

    def _rows(self, outputs: Mapping[int, Any]) -> list[StepRow[VllmSequence]]:
        running, found, features = self._running, dict[str, Any](), sent_features(self._scheduler.ran)
        for group in outputs.values():
            self.scheduler_stats = group.scheduler_stats or self.scheduler_stats
            found |= {output.request_id: output for output in group.outputs if output.request_id in running}
        rows = []
        for name in self._scheduler.step.counts:
            if (sequence := running.get(name)) is None:
                continue
            output = found.get(name)
            rows.append(row := self._row(sequence, decides=output is not None))
            if features is not None:
                row.start, row.states = features.of(name)
            try:
                if output is not None:
                    self._settle(row, output)
            except Exception as error:
                row.error = error
        return rows

    def _row(self, sequence: VllmSequence, *, decides: bool) -> StepRow[VllmSequence]:
        facts, name = self._scheduler.step, sequence.request_id
        verified = self._verified(name)
        count = facts.counts[name] - len(verified.draft)
        return StepRow(
            sequence=sequence,
            key=sequence.key,
            base_len=sequence.committed_len,
            num_tokens=count,
            decides=decides,
            decodes=facts.decodes(name),
            times=sequence.timer.times,
            draft=verified.draft,
        )

    def _verified(self, request_id: str) -> ChainRow:
        found: ChainRow = self._scheduler.verified.get(request_id, NOTHING)
        return found

    def _settle(self, row: StepRow[VllmSequence], output: Any) -> None:
        """What the row commits."""
        sequence, prompt_len = row.sequence, len(row.sequence.spec.prompt)
        if (grammar := sequence.grammar) is not None and grammar.error is not None:
            raise grammar.error
        if output.finish_reason not in FINISHES:
            raise Unavailable(f"vLLM ended the request: {output.finish_reason}")
        self._verified(output.request_id).fill(row, list(output.new_token_ids), FINISHES[output.finish_reason])
        if grammar is not None:
            grammar.settle()
        row.num_prompt_tokens = 0 if sequence.answered else prompt_len
        row.num_cached_tokens = _num_cached(output, prompt_len)
        row.top = sequence.logprobs(output.new_logprobs)
        row.prompt_logprobs = sequence.prompt_logprobs(output.new_prompt_logprobs_tensors)

    def follow(self, row: StepRow[VllmSequence]) -> None:
        row.sequence.committed_len += len(row.token_ids)
        row.sequence.answered |= bool(row.token_ids)


def _num_cached(output: Any, prompt_len: int) -> int:
    """Prompt tokens found in the prefix cache; 0 after the first commit."""
    found = output.prefill_stats
    return 0 if found is None else min(found.num_cached_tokens, prompt_len)
