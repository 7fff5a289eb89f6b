"""The connections of one target to its draft workers: one for each that holds a lease and that a router named.

Lives in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.drafting.pool.leases import DraftLeases
from outrider.drafting.pool.link import UNREACHABLE, DraftLink, Listener
from outrider.drafting.source import DraftAssignment
from outrider.errors import Unavailable
from outrider.rpc.channel import Connect
from outrider.rpc.v1 import draft_pb2
from outrider.sequence.key import SequenceKey

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
