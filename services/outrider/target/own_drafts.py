"""The sources of drafts in the target's own process: what they are told, and what they propose.

They run on the step thread, between steps. One that fails loses its proposals, and no sequence ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.drafting.source import CloseReason, DraftSource, reads_states
from outrider.drafting.tree import DraftTree
from outrider.engine.taps import HEAD_INPUT
from outrider.protocol.sequence_key import SequenceKey
from outrider.target.opening import Opening, Speculation
from outrider.target.report import TargetStats
from outrider.target.sequences import OpenSequences

log = logging.getLogger(__name__)


class OwnDrafts:
    """All such sources of one worker."""

    def __init__(self, sources: Sequence[DraftSource], stats: TargetStats) -> None:
        self._sources = sources
        self._reader = next(filter(reads_states, sources), None)
        self.taps = () if self._reader is None else self._reader.taps or (HEAD_INPUT,)
        """The layers whose states a step has to give."""
        self._stats = stats

    def open(self, key: SequenceKey, opening: Opening) -> None:
        if self._sources:
            told = opening.for_drafts(opening.speculation.own_limits)
            self._tell(lambda source: source.open(key, told))

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        self._tell(lambda source: source.commit(key, base_len, tokens))

    def see(self, key: SequenceKey, start: int, states: Tensor | None) -> None:
        """The states of committed positions, for the source that asked for them."""
        if states is not None and self._reader is not None:
            reader = self._reader
            self._tell(lambda source: reader.see(key, start, states) if source is reader else None)

    def limit(self, key: SequenceKey, speculation: Speculation) -> None:
        self._tell(lambda source: source.limit(key, speculation.own_limits))

    def close(self, key: SequenceKey) -> None:
        self._tell(lambda source: source.close(key, CloseReason.FINISHED))

    def offer(self, sequences: OpenSequences) -> None:
        """Gives each sequence what was proposed for it."""
        self._tell(lambda source: self._poll(source, sequences))

    def _poll(self, source: DraftSource, sequences: OpenSequences) -> None:
        for key, found in source.poll():
            if isinstance(found, DraftTree) and key in sequences:
                sequences.get(key).put(found)

    def _tell(self, tell: Callable[[DraftSource], None]) -> None:
        if not self._sources:
            return
        for source in self._sources:
            started_s = time.perf_counter()
            try:
                tell(source)
            except Exception as error:
                # A draft only affects latency.
                log.error("a source of drafts failed", exc_info=error)
                self._stats.num_source_failures += 1
            self._stats.of_source(source.name).draft_s += time.perf_counter() - started_s
