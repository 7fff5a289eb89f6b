"""The sources of drafts in the target's own process: what they are told, and what they propose.

They run on the step thread, between steps. One that fails loses its proposals, and no sequence ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.drafting.source import CloseReason, DraftLimits, DraftSource, Features, learns, reads_states
from outrider.drafting.speculation import Speculation
from outrider.engine.models.taps import HEAD_INPUT
from outrider.heads import HeadFeatures
from outrider.protocol.sequence_key import SequenceKey
from outrider.target.requests.opening import Opening
from outrider.target.requests.report import TargetStats
from outrider.tree import DraftTree

log = logging.getLogger(__name__)

Put = Callable[[SequenceKey, DraftTree], None]


class OwnDrafts:
    def __init__(self, sources: Sequence[DraftSource], stats: TargetStats) -> None:
        self._sources = sources
        self._reader = next(filter(reads_states, sources), None)
        self.taps = () if self._reader is None else self._reader.taps or (HEAD_INPUT,)
        """The layers whose states a step has to give."""
        self.deepen: Callable[[Speculation], Speculation] = lambda setting: setting
        """What sources are told of a sequence's setting: an engine may need drafts that are longer than its steps."""
        self._stats = stats
        self._erased_us: dict[str, int] = {}
        self._committed: list[tuple[SequenceKey, int, Sequence[int]]] = []
        """What the sources are still to be told: together, because a call of each costs as much as an n-gram's."""

    def open(self, key: SequenceKey, opening: Opening) -> None:
        learns = opening.consent_us >= self._erased_us.get(opening.tenant, 0)
        if self._sources:
            setting = self.deepen(opening.speculation)
            self._tell(lambda source: source.open(key, opening.for_drafts(_limits(source, setting), learns=learns)))

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        if self._sources:
            self._committed.append((key, base_len, tokens))

    def see(self, key: SequenceKey, start: int, states: Tensor) -> None:
        """The states of committed positions, for the source that asked for them."""
        if self._reader is not None:
            reader = self._reader
            self._tell(lambda source: reader.see(key, start, states) if source is reader else None)

    def take_features(self, key: SequenceKey) -> list[Features]:
        """What a head on draft workers reads of what was seen since the last call."""
        return self._reader.take(key) if isinstance(self._reader, HeadFeatures) else []

    def limit(self, key: SequenceKey, speculation: Speculation) -> None:
        self._tell(lambda source: source.limit(key, _limits(source, self.deepen(speculation))))

    def close(self, key: SequenceKey) -> None:
        self._hand_on()
        self._tell(lambda source: source.close(key, CloseReason.FINISHED))

    def erase(self, tenant: str, ordered_us: int = 0) -> int:
        """Sources forget the texts of a tenant; returns how many there were. One that was asked for before the order
        and comes here later, from a target that was lost, is not learnt either.
        """
        self._erased_us[tenant] = max(ordered_us, self._erased_us.get(tenant, 0))
        return sum(source.erase(tenant) for source in self._sources if learns(source))

    def offer(self, put: Put) -> None:
        """Gives `put` what was proposed, and for which sequence."""
        self._hand_on()
        self._tell(lambda source: _poll(source, put))

    def _hand_on(self) -> None:
        committed, self._committed = self._committed, []
        if committed:
            self._tell(lambda source: _commit(source, committed))

    def _tell(self, tell: Callable[[DraftSource], None]) -> None:
        for source in self._sources:
            started_s = time.perf_counter()
            try:
                tell(source)
            except Exception as error:
                # A draft only affects latency.
                log.error("a source of drafts failed", exc_info=error)
                self._stats.num_source_failures += 1
            self._stats.of_source(source.name).draft_s += time.perf_counter() - started_s


def _limits(source: DraftSource, speculation: Speculation) -> DraftLimits:
    """Who computes features for draft workers goes by what those may draft."""
    return speculation.draft_limits(0.0) if isinstance(source, HeadFeatures) else speculation.own_limits


def _commit(source: DraftSource, committed: Sequence[tuple[SequenceKey, int, Sequence[int]]]) -> None:
    for key, base_len, tokens in committed:
        source.commit(key, base_len, tokens)


def _poll(source: DraftSource, put: Put) -> None:
    for key, found in source.poll():
        if isinstance(found, DraftTree):
            put(key, found)
