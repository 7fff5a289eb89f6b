"""A target's core on vLLM: events in, vLLM's steps run, reports out. Owned by one thread; knows no network.

vLLM schedules, runs, samples and stops; here its results become commits. A fault of vLLM itself ends every sequence, so
that routers continue them elsewhere, and this worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.v1.engine.core import EngineCore

from outrider.drafting.source import DraftSource
from outrider.errors import Unavailable
from outrider.speculation import Grammar
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetStats
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer
from outrider.target.samples import SampleRecorder
from outrider.target.step.accounting import StepAccounting
from outrider.target.step.core import TargetCore
from outrider.vllm.drafts import DraftBook, VerifiedDraft, beyond_a_step
from outrider.vllm.target.grammar import MaskedGrammar
from outrider.vllm.target.opening import check_supported, request_of
from outrider.vllm.target.sequence import FINISHES, VllmSequence, VllmSequences
from outrider.worker.events import Load, Opened
from outrider.worker.watchdog import MIN_ON_GPU_S, StepPace

log = logging.getLogger(__name__)

_PAUSE_S = 0.005
"""After a step in which vLLM could run nothing."""


class VllmMachine(TargetCore[VllmSequence]):
    """Sequences and the vLLM engine that runs them."""

    _sequences: VllmSequences

    def __init__(
        self,
        core: EngineCore,
        limits: Limits,
        clock: Callable[[], float],
        on_broken: Callable[[], None] = lambda: None,
        sources: Sequence[DraftSource] = (),
        samples: SampleRecorder | None = None,
    ) -> None:
        """`on_broken` is called when vLLM's engine has failed: it cannot be used again. `sources`: those of drafts that
        are made in this process."""
        scheduler, stats = core.scheduler, TargetStats()
        book: DraftBook = scheduler.book
        # The scheduler measures steps, because it may run without a target.
        accounting = StepAccounting(stats, lambda cost: book.row_price, book.cost, book.calibration)
        # On a CPU too: the model runs in other processes, which may be starved while this one is not.
        pace = StepPace(scheduler.max_num_scheduled_tokens, MIN_ON_GPU_S)
        super().__init__(VllmSequences(stats, core, book), accounting, limits, pace, clock, sources, samples)
        self.scheduler_stats: Any = None
        """vLLM's own, of the last step that had any."""
        self._core = core
        self._scheduler = scheduler
        self._book = book
        self._on_broken = on_broken
        self._drafts.deepen = beyond_a_step

    @property
    def load(self) -> Load:
        running, cost = len(self._scheduler.running), self._book.cost
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        times_ns = round(cost.prompt_token_s * 1e9), round(cost.row_s * 1e9)
        return Load(
            running, max(0, len(self._sequences) - running), free, len(self._sequences), self.draining, *times_ns
        )

    def _prefix_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        added, removed = self._scheduler.kv_event_publisher.take()
        return added, removed

    def _start(self, event: Opened, drafts: SequenceDrafts) -> None:
        sequence = VllmSequence(event.key, event.opening, Timer(event.received_s), drafts, self._begin)
        self._sequences.add(sequence)
        self._guarded(event.key, sequence, lambda: self._check(sequence))

    def _check(self, sequence: VllmSequence) -> None:
        check_supported(sequence.opening)
        if not sequence.opening.has_grammar:
            self._begin(sequence, None)

    def _begin(self, sequence: VllmSequence, grammar: Grammar | None) -> None:
        """From here on vLLM runs it."""
        opening = sequence.opening
        sequence.request = request_of(
            sequence.request_id, opening, sequence.drafts.tokens, self._limits, self._core.request_block_hasher
        )
        if grammar is not None:
            sequence.grammar = MaskedGrammar(grammar)
            sequence.request.structured_output_request.grammar = sequence.grammar
            sequence.drafts.num_possible = sequence.grammar.num_possible
        self._core.add_request(sequence.request)
        self._sequences.running[sequence.request_id] = sequence
        self._book.open(sequence.request_id, sequence.drafts)

    def step(self) -> float | None:
        """Runs one step of vLLM. Returns as `StepMachine.step`. Raises Unavailable when vLLM's engine has failed."""
        self._drafts.poll()
        if not (self._scheduler.has_requests() or self._core.batch_queue):
            return None
        try:
            outputs, ran = self._core.step_fn()
            self._core.post_step(ran)
        except Exception as error:
            self._on_broken()
            raise Unavailable(f"vLLM's engine failed: {type(error).__name__}") from error
        # With asynchronous scheduling a step is scheduled before the one that it follows has ended.
        if outputs is not None and self._scheduler.step.counts:
            self._finish_step(outputs, self._clock() - self._scheduler.step.seconds)
        elif not ran:
            return self._clock() + _PAUSE_S if self._scheduler.has_requests() else None
        return 0.0

    # -- results of a step

    def _finish_step(self, outputs: Mapping[int, Any], started_s: float) -> None:
        running, found = self._sequences.running, dict[str, Any]()
        for group in outputs.values():
            self.scheduler_stats = group.scheduler_stats or self.scheduler_stats
            found |= {output.request_id: output for output in group.outputs if output.request_id in running}
        stepped = [running[name] for name in self._scheduler.step.counts if name in running]
        rows = [self._row(sequence, decides=sequence.request_id in found) for sequence in stepped]
        for row in rows:
            sequence = row.sequence
            sequence.timer.step_began(started_s)
            if (features := self._scheduler.features) is not None:
                self._see(row, *features.of(sequence.request_id))
            if (output := found.get(sequence.request_id)) is not None:
                self._guarded(row.key, sequence, partial(self._settle, row, output), "in its step")
        self._report_step(rows, started_s)
        self.stats.num_preemptions = self._scheduler.num_preemptions

    def _row(self, sequence: VllmSequence, *, decides: bool) -> StepRow[VllmSequence]:
        facts, name = self._scheduler.step, sequence.request_id
        verified = self._verified(name)
        count = facts.counts[name] - len(verified.draft)
        made = StepRow(sequence, sequence.key, sequence.committed_len, 0, count, decides, facts.decodes(name))
        made.times, made.draft = sequence.timer.times, verified.draft
        return made

    def _verified(self, request_id: str) -> VerifiedDraft:
        found: VerifiedDraft = self._scheduler.verified.get(request_id, VerifiedDraft())
        return found

    def _settle(self, row: StepRow[VllmSequence], output: Any) -> None:
        if (grammar := row.sequence.grammar) is not None and grammar.error is not None:
            raise grammar.error
        if output.finish_reason not in FINISHES:
            raise Unavailable(f"vLLM ended the request: {output.finish_reason}")
        self._commit(row, output)
        if output.finish_reason is not None:
            self._remove(row.key)

    def _commit(self, row: StepRow[VllmSequence], output: Any) -> None:
        sequence, token_ids, prompt_len = row.sequence, list(output.new_token_ids), len(row.sequence.opening.prompt)
        self._verified(output.request_id).fill(row, token_ids, FINISHES[output.finish_reason])
        if sequence.grammar is not None:
            sequence.grammar.settle()
        self._drafts.follow(row.key, row.base_len, token_ids)
        row.times = sequence.timer.take()
        row.num_prompt_tokens = 0 if sequence.answered else prompt_len
        row.num_cached_tokens = _num_cached(output, prompt_len)
        row.top = sequence.logprobs(output.new_logprobs)
        row.logprobs = sequence.opening.asked_logprobs(row.top)
        row.prompt_logprobs = sequence.prompt_logprobs(output.new_prompt_logprobs_tensors)
        sequence.committed_len += len(token_ids)
        sequence.answered = True
        self._report.commits.append(row)
        self._accounting.committed(row)


def _num_cached(output: Any, prompt_len: int) -> int:
    """Prompt tokens found in the prefix cache; 0 after the first commit."""
    found = output.prefill_stats
    return 0 if found is None else min(found.num_cached_tokens, prompt_len)
