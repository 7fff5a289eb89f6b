"""The drafts of the pool: opens each sequence at the draft worker that its router named, and passes commits and
proposals between the two.

A router decides which worker drafts, how far, and what follows when a draft fails. Lives in the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from outrider.drafting.pool.leases import DraftLeases
from outrider.drafting.pool.link import DraftLink
from outrider.drafting.pool.links import DraftLinks
from outrider.drafting.pool.sequence import DraftVocabulary, PooledSequence
from outrider.drafting.source import CloseReason, DraftAssignment, DraftLimits, Features, SourceOpening
from outrider.drafting.tree import DraftTree
from outrider.errors import InvalidRequest, OutriderError
from outrider.protocol.errors import from_sequence_error
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2


@dataclass(slots=True)
class _Open:
    """One sequence that is open here: all that a draft would be sent now."""

    opening: SourceOpening
    limits: DraftLimits
    committed: list[int]
    pooled: PooledSequence | None = None


@dataclass(frozen=True, slots=True)
class PoolListener:
    """Told of what happens in the pool. Called in the event loop; must neither raise nor block."""

    arrived: Callable[[], None] = lambda: None
    """`poll` has something to give."""
    spent: Callable[[SequenceKey, int], None] = lambda key, share_us: None
    """A draft spent this time on a sequence, which no commit will report any more."""
    lost: Callable[[SequenceKey, int, OutriderError], None] = lambda key, sequence_id, problem: None
    """A sequence continues without the draft that it had under this id."""
    unleased: Callable[[], None] = lambda: None
    """A router has named a draft that holds no lease."""


@dataclass(slots=True)
class PoolDrafts:
    """All sequences of one target at its draft workers. A DraftSource."""

    name: ClassVar[str] = "pool"
    vocabulary: DraftVocabulary
    clock: Callable[[], float]
    """Monotonic seconds."""
    leases: DraftLeases
    listener: PoolListener = field(default_factory=PoolListener)
    connect: Connect = create_channel
    credential: tuple[tuple[str, str], ...] = ()
    """Metadata of calls to drafts."""
    features: str = ""
    """Which features this target computes, as in its WorkerInfo; empty: none."""
    links: DraftLinks = field(init=False)
    _open: dict[SequenceKey, _Open] = field(default_factory=dict)
    _arrived: deque[tuple[SequenceKey, DraftTree | OutriderError]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        callbacks = self._pair, self._replied, self._lose, self.listener.unleased
        self.links = DraftLinks(self.leases, *callbacks, self.connect, self.credential)

    def open(self, key: SequenceKey, opening: SourceOpening, assignment: DraftAssignment | None = None) -> None:
        """Without an assignment it waits for one."""
        if key not in self._open:
            self._open[key] = _Open(opening, opening.limits, list(opening.committed))
            if assignment is not None:
                self.assign(key, assignment)

    def assign(self, key: SequenceKey, assignment: DraftAssignment | None) -> None:
        """From now on this draft proposes for the sequence; None for no draft."""
        if (found := self._open.get(key)) is None:
            return
        self.links.cancel(key)
        self._unpair(found, CloseReason.MOVED)
        if assignment is not None:
            self.links.look_up(key, assignment)

    def commit(
        self,
        key: SequenceKey,
        base_len: int,
        tokens: Sequence[int],
        features: Features | None = None,
        in_use: tuple[int, int] = (0, 0),
    ) -> None:
        """`in_use`: for a shadow, drafted and accepted tokens of the draft worker that was verified."""
        if (found := self._open.get(key)) is not None:
            found.committed.extend(tokens)
            if found.pooled is not None:
                found.pooled.commit(base_len, tokens, self._now_us(), features, in_use)

    def limit(self, key: SequenceKey, limits: DraftLimits) -> None:
        if (found := self._open.get(key)) is not None:
            found.limits = limits
            if found.pooled is not None:
                found.pooled.limit(limits)

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self.links.cancel(key)
        if (found := self._open.pop(key, None)) is not None:
            self._unpair(found, reason)

    def poll(self) -> Iterator[tuple[SequenceKey, DraftTree | OutriderError]]:
        """May be called in any thread."""
        while self._arrived:
            yield self._arrived.popleft()

    def take_stats(
        self, key: SequenceKey, base_len: int, num_drafted: int, serial: int, committed_len: int, useful_s: float
    ) -> sequence_pb2.DraftStats | None:
        """As PooledSequence.take_stats, before the commit is passed on."""
        found = self._open.get(key)
        if found is None or found.pooled is None:
            return None
        return found.pooled.take_stats(base_len, num_drafted, serial, committed_len, useful_s)

    def _now_us(self) -> int:
        return round(self.clock() * 1e6)

    def _pair(self, key: SequenceKey, draft: DraftAssignment) -> None:
        found = self._open[key]
        opening = replace(found.opening, committed=found.committed)
        try:
            link = self.links.get(draft)
            found.pooled = PooledSequence.open(
                *(link, draft.sequence_id, key, opening, found.limits, self.vocabulary, self._now_us()),
                reads_features=bool(self.features) and self.leases.features_of(draft.worker_id) == self.features,
            )
        except OutriderError as problem:
            self.listener.lost(key, draft.sequence_id, problem)
        except ValueError as error:
            # A token id that no message can hold: not every target checks them.
            self.listener.lost(key, draft.sequence_id, InvalidRequest("opening", str(error)))

    def _unpair(self, found: _Open, reason: CloseReason) -> None:
        pooled, found.pooled = found.pooled, None
        if pooled is not None:
            self._spent(pooled.close(reason), pooled.share_us)

    # -- messages from drafts

    def _replied(self, link: DraftLink, reply: draft_pb2.DraftResponse) -> None:
        for draft in reply.drafts:
            self._take(link, draft)
        if self._arrived:
            self.listener.arrived()
        for message in reply.errors:
            if (key := link.keys.get(message.sequence_id)) is not None:
                self._lose(key, from_sequence_error(message))
        for usage in reply.usage:
            self._spent(link.last_closed.get(usage.sequence_id), usage.share_us)

    def _take(self, link: DraftLink, draft: sequence_pb2.Draft) -> None:
        # A late message, about a sequence that has ended, finds nothing.
        if (key := link.keys.get(draft.sequence_id)) is None or (pooled := self._open[key].pooled) is None:
            self._spent(link.last_closed.get(draft.sequence_id), draft.share_us)
            return
        pooled.share_us += draft.share_us
        try:
            self._arrived.append((key, pooled.take(draft, self._now_us())))
        except OutriderError as error:
            self._lose(key, error)
            self._arrived.append((key, error))

    def _lose(self, key: SequenceKey, problem: OutriderError) -> None:
        """The sequence continues without its draft, and the router is sent the reason."""
        found = self._open[key]
        assert found.pooled is not None
        sequence_id = found.pooled.sequence_id
        self._unpair(found, CloseReason.MOVED)
        self.listener.lost(key, sequence_id, problem)

    def _spent(self, key: SequenceKey | None, share_us: int) -> None:
        if key is not None and share_us:
            self.listener.spent(key, share_us)
