"""One session under way: where it is open, how it has fared, and what its driver has to look at next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import OutriderError
from outrider.rpc.v1 import router_pb2 as router

from outrider_controller.router.links import TargetLink
from outrider_controller.router.policy import Pace
from outrider_controller.router.pools import DraftWorker, LinkKey, Prefix
from outrider_controller.router.session import Session
from outrider_controller.router.traces import Recorder

# A request that breaks a target at every few tokens must not go through all of them.
_ROUNDS_TO_CLEAR = 16


class Wake(Enum):
    """A worker is missing, one that was missing may have come, or the session has finished."""

    LOOK = "look"


Event = OutriderError | Wake
NewResponse = Callable[[], router.RouteResponse]
"""Gives the empty message that goes out next, to be filled in at once. Must neither raise nor block."""


@dataclass(frozen=True, slots=True)
class TargetOpening:
    sequence_id: int
    link: TargetLink


@dataclass(frozen=True, slots=True)
class DraftOpening:
    sequence_id: int
    """Under which the target opens it there."""
    worker: DraftWorker


@dataclass(slots=True, eq=False)
class Course:
    """Changed only in the event loop, by link callbacks and by the one task that drives it."""

    session: Session
    recorder: Recorder
    pace: Pace
    new_response: NewResponse
    draft_limit: int
    """Most drafted tokens per step that this request may have; 0 means no draft is ever opened."""
    revision: str
    """The target's: a failover stays on it, or on its weights where no other target has it."""
    told_revision: bool = False
    """Whether the client has heard of it."""
    target: TargetOpening | None = None
    draft: DraftOpening | None = None
    failed_targets: set[LinkKey] = field(default_factory=set)
    """Targets that failed with this request. Asked again only where there is no other."""
    left_targets: set[LinkKey] = field(default_factory=set)
    """Targets that are leaving."""
    refused_by: set[LinkKey] = field(default_factory=set)
    """Targets that had no room. Asked again after a while."""
    avoid_drafts: set[str] = field(default_factory=set)
    target_failures: int = 0
    """Targets that said they failed, or said what cannot be true."""
    lost_connections: int = 0
    """Targets whose stream broke."""
    rounds_here: int = 0
    """That the target it is on has committed."""
    draft_failures: int = 0
    num_targets: int = 0
    num_drafts: int = 0
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _waking: bool = False

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.session.token_ids, self.session.request.cache_salt)

    @property
    def lacks_draft(self) -> bool:
        """A draft could be of use and none is open."""
        return self.draft is None and self.draft_limit > 0 and not self.session.finished

    @property
    def untouched(self) -> bool:
        """Nothing was committed by any target: the request may still be turned away."""
        return self.session.metrics.num_steps == 0

    def carried_on(self) -> None:
        """One more round was committed. A target that carries the request so far shows that it is not the cause."""
        self.rounds_here += 1
        if self.rounds_here == _ROUNDS_TO_CLEAR:
            self.target_failures = self.lost_connections = 0

    def wake(self) -> None:
        """Has the driver look at the course; once, however often it is called before it does."""
        if not self._waking:
            self._waking = True
            self.events.put_nowait(Wake.LOOK)

    async def next_event(self) -> Event:
        event = await self.events.get()
        if event is Wake.LOOK:
            self._waking = False
        return event
