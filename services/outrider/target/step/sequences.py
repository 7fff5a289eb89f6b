"""The sequences that are open on a target worker, and which of them have KV. Knows no model.

A sequence waits for KV at first, and again after a preemption.
"""

from __future__ import annotations

import itertools

from outrider.drafting.tree import DraftTree
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.target.requests.opening import Opening
from outrider.target.requests.report import TargetStats
from outrider.target.step.core import KnownSequences
from outrider.target.step.scheduler import Batching, admissible
from outrider.target.step.sequence import TargetSequence
from outrider.target.step.times import Timer
from outrider.worker.events import SequenceKey


class OpenSequences(KnownSequences[TargetSequence]):
    """The sequences that our own engine runs."""

    def __init__(self, kv: KVCacheManager, stats: TargetStats) -> None:
        super().__init__(stats)
        self._kv = kv
        self._serials = itertools.count()

    @property
    def num_running(self) -> int:
        """Sequences that have KV."""
        return sum(1 for sequence in self if sequence.kv is not None)

    def put(self, key: SequenceKey, tree: DraftTree) -> None:
        """A tree that was made in this process, for a sequence that may have ended."""
        if (sequence := self._open.get(key)) is not None:
            sequence.put(tree)

    def add(self, key: SequenceKey, opening: Opening, max_context_len: int, received_s: float) -> TargetSequence:
        made = TargetSequence(key, next(self._serials), opening, max_context_len, Timer(received_s))
        self._open[key] = made
        return made

    def admit(self, batching: Batching) -> None:
        """Gives KV to those that wait for it, as far as all that have it can finish their prefill."""
        for sequence in admissible(list(self), batching, self._kv.num_free_blocks):
            # Cached tokens have no logits, so the prefix cache is not used.
            cached = () if sequence.wants_prompt_logprobs else sequence.tokens
            sequence.kv = self._kv.open(cached, sequence.opening.salt)
            report = sequence.prompt_report
            if report is not None and report.num_cached_tokens is None:
                report.num_cached_tokens = min(sequence.cached_len, len(sequence.opening.prompt))

    def preempt(self, victim: TargetSequence) -> None:
        """Releases the victim's KV. It keeps its tokens, and is later recomputed from what the prefix cache has
        then."""
        if victim.kv is not None:
            self._release(victim)
            self._stats.num_preemptions += 1

    def remove(self, key: SequenceKey) -> TargetSequence | None:
        """Forgets the sequence and releases its KV. None when it is not open."""
        sequence = self._open.pop(key, None)
        if sequence is not None:
            self._release(sequence)
        return sequence

    def _release(self, sequence: TargetSequence) -> None:
        if sequence.kv is not None:
            self._kv.close(sequence.kv)
            sequence.kv = None
