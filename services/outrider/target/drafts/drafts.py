"""The drafts of one target: its sources in this process, and what these and draft workers propose for each sequence.

Lives on the step thread, and works between steps; knows neither engine nor router. A source that fails loses its
proposals, and no sequence ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outrider.drafting.source import CloseReason, DraftSource, Features, Seen
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.calibration import Calibration
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.report import TargetStats
from outrider.target.requests.row import StepRow

log = logging.getLogger(__name__)


class Drafts:
    def __init__(
        self,
        sources: Sequence[DraftSource],
        stats: TargetStats,
        calibration: Calibration,
        deepen: Callable[[Speculation], Speculation] = lambda setting: setting,
    ) -> None:
        """`deepen`: what sources are told of a setting: an engine may need drafts that are longer than its steps."""
        self._sources = sources
        self.calibration = calibration
        read = [source.taps for source in sources if source.taps is not None]
        self.taps: tuple[int, ...] | None = read[0] if read else None
        """The layers whose states a step has to give; empty: what the vocabulary head reads; None: none."""
        self._deepen = deepen
        self._stats = stats
        self._open: dict[SequenceKey, SequenceDrafts] = {}
        self._erased_us: dict[str, int] = {}
        self._committed: list[tuple[SequenceKey, int, Sequence[int]]] = []
        """What the sources are still to be told: together, because a call of each costs as much as an n-gram's."""

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: list[int]) -> SequenceDrafts:
        """`tokens`: the sequence's own, which its engine extends."""
        made = self._open[key] = SequenceDrafts.of(spec, tokens)
        made.deep, made.fit = self._deepen(spec.speculation), self.calibration.fit(spec.tenant)
        spec = replace(spec, learns=spec.consent_unix_us >= self._erased_us.get(spec.tenant, 0))
        self._tell(lambda source: source.open(key, replace(spec, speculation=_limits(source, made.deep)), tokens))
        return made

    def poll(self) -> None:
        """Takes what the sources have proposed since the last commits."""
        self._hand_on()
        self._tell(self._poll)

    def commit(self, row: StepRow[Any]) -> None:
        found = self._open[row.key]
        found.advance(row.token_ids, row.num_drafted)
        row.num_dropped = found.buffer.take_num_dropped()
        self.follow(row.key, row.base_len, row.token_ids)

    def follow(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None:
        """Tells the sources alone."""
        if self._sources:
            self._committed.append((key, base_len, tokens))

    def see(self, step: Sequence[Seen]) -> list[tuple[SequenceKey, Features]]:
        """As DraftSource."""
        found: list[tuple[SequenceKey, Features]] = []
        self._tell(lambda source: found.extend(source.see(step)))
        return found

    def limit(self, key: SequenceKey, speculation: Speculation) -> None:
        if (found := self._open.get(key)) is not None:
            found.adjust(speculation, self._deepen(speculation))
            self._tell(lambda source: source.limit(key, _limits(source, found.deep)))

    def paired(self, key: SequenceKey, bits: int) -> None:
        """As DraftSource."""
        self._tell(lambda source: source.paired(key, bits))

    def close(self, key: SequenceKey) -> None:
        if self._open.pop(key, None) is not None and self._sources:
            self._hand_on()
            self._tell(lambda source: source.close(key, CloseReason.FINISHED))

    def erase(self, tenant: str, ordered_us: int = 0) -> int:
        """Sources forget the texts of a tenant; returns how many there were. One that was asked for before the order
        and comes here later, from a target that was lost, is not learnt either.
        """
        self._erased_us[tenant] = max(ordered_us, self._erased_us.get(tenant, 0))
        return sum(source.erase(tenant) for source in self._sources)

    def _hand_on(self) -> None:
        committed, self._committed = self._committed, []
        if committed:
            self._tell(lambda source: _commit(source, committed))

    def _poll(self, source: DraftSource) -> None:
        for key, tree in source.poll():
            if (found := self._open.get(key)) is not None:
                found.put(tree)

    def _tell(self, tell: Callable[[DraftSource], object]) -> None:
        for source in self._sources:
            started_s = time.perf_counter()
            try:
                tell(source)
            except Exception as error:
                # A draft only affects latency.
                log.error("a source of drafts failed", exc_info=error)
                self._stats.num_source_failures += 1
            self._stats.of_source(source.name).draft_s += time.perf_counter() - started_s


def _limits(source: DraftSource, speculation: Speculation) -> Speculation:
    return speculation.for_draft(0.0) if source.for_workers else speculation.for_own


def _commit(source: DraftSource, committed: Sequence[tuple[SequenceKey, int, Sequence[int]]]) -> None:
    for key, base_len, tokens in committed:
        source.commit(key, base_len, tokens)
