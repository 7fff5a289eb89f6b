"""The drafts of the pool: opens each sequence at the draft worker that its router named, and passes commits and
proposals between the two.

A router decides which worker drafts, how far, and what follows when a draft fails. Lives in the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from outrider.drafting.pool.leases import DraftLeases
from outrider.drafting.pool.link import UNREACHABLE, DraftLink, Listener
from outrider.drafting.pool.sequence import DraftVocabulary, PooledSequence
from outrider.drafting.source import CloseReason, DraftAssignment, DraftLimits, Features, SourceOpening
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.protocol.errors import from_sequence_error
from outrider.protocol.sequence_key import SequenceKey
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.v1 import draft_pb2, sequence_pb2
from outrider.tree import DraftTree


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

    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int], features: Features | None = None) -> None:
        if (found := self._open.get(key)) is not None:
            found.committed.extend(tokens)
            if found.pooled is not None:
                found.pooled.commit(base_len, tokens, self._now_us(), features)

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


# More drafts than one target is ever assigned.
_MAX_LINKS = 256
# Least time between two readings of the leases.
_LOOK_PAUSE_S = 0.1


class DraftLinks:
    def __init__(
        self,
        leases: DraftLeases,
        found: Callable[[SequenceKey, DraftAssignment], None],
        replied: Callable[[DraftLink, draft_pb2.DraftResponse], None],
        lost: Callable[[SequenceKey, Unavailable], None],
        unleased: Callable[[], None],
        connect: Connect,
        credential: tuple[tuple[str, str], ...],
    ) -> None:
        """`found` is called when `get` can answer for an assignment, `lost` for each sequence on a link that ended,
        `unleased` for each assigned draft that holds no lease. `credential`: metadata of calls to drafts."""
        self.by_draft: dict[tuple[str, str], DraftLink] = {}
        """By worker id and address."""
        self._leases = leases
        self._found = found
        self._lost = lost
        self._unleased = unleased
        self._connect = connect
        self._credential = credential
        self._listener = Listener(replied, self._ended, self._forget)
        self._waiting: dict[SequenceKey, DraftAssignment] = {}
        """Assigned drafts whose leases are still to be checked."""
        self._looking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        links = list(self.by_draft.values())
        self.by_draft.clear()
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(link.stop() for link in links))

    def look_up(self, key: SequenceKey, draft: DraftAssignment) -> None:
        """Calls `found`: at once if the draft's lease is known, else after the next reading, unless cancelled."""
        if self._leases.hold(draft.worker_id, draft.address):
            self._found(key, draft)
            return
        self._waiting[key] = draft
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look for drafts")

    def cancel(self, key: SequenceKey) -> None:
        self._waiting.pop(key, None)

    def get(self, draft: DraftAssignment) -> DraftLink:
        """Connects if there is no link yet. Raises Unavailable without a lease, and when there are too many links."""
        name = draft.worker_id, draft.address
        if not self._leases.hold(*name):
            self._unleased()
            raise Unavailable("no lease names this draft at this address", reason=UNREACHABLE)
        if name not in self.by_draft:
            if len(self.by_draft) >= _MAX_LINKS:
                raise Unavailable(f"all {_MAX_LINKS} links are in use", reason=UNREACHABLE)
            self.by_draft[name] = DraftLink(*name, self._connect, self._listener, self._credential)
        return self.by_draft[name]

    async def _look(self) -> None:
        try:
            while self._waiting:
                waiting = dict(self._waiting)
                await self._leases.look()
                for key, draft in waiting.items():
                    # It may have ended meanwhile, or have been given another draft.
                    if self._waiting.get(key) is draft:
                        del self._waiting[key]
                        self._found(key, draft)
                await asyncio.sleep(_LOOK_PAUSE_S)
        finally:
            self._looking = None

    def _ended(self, link: DraftLink, error: Unavailable) -> None:
        self._forget(link)
        for key in list(link.keys.values()):
            self._lost(key, error)

    def _forget(self, link: DraftLink) -> None:
        name = link.worker_id, link.address
        if self.by_draft.get(name) is link:
            del self.by_draft[name]
