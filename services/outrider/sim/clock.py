"""An event loop whose clock jumps to the next timer: hours take milliseconds, and a run can be repeated exactly.

Nothing may wait for external events: no sockets, no threads, no subprocesses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_TURNS_AT_ONE_TIME = 50_000


class Deadlock(RuntimeError):
    """All tasks wait, and no timer is set."""


class Livelock(RuntimeError):
    """Tasks run without end while time stands still."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Sleeping takes no real time. Collects unhandled exceptions, which asyncio would only log."""

    def __init__(self) -> None:
        super().__init__()
        self.unhandled: list[str] = []
        self._now_s = 1000.0
        self._turns = 0
        self._selector = self
        self.set_exception_handler(self._keep)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Moves the clock where a selector would wait for sockets."""
        if timeout is None:
            raise Deadlock("nothing is left that could happen")
        if timeout > 0:
            self._now_s += timeout
            self._turns = 0
        self._turns += 1
        if self._turns > _MAX_TURNS_AT_ONE_TIME:
            raise Livelock("time does not get on")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        # Wakes a sleeping selector. Ours never sleeps.
        pass

    def _keep(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        culprit = context.get("exception") or context.get("task")
        self.unhandled.append(f"{context['message']}: {culprit!r}" if culprit else context["message"])


def run_virtually(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Runs to the end of `main` and closes the loop. Tasks that outlive it are cancelled."""
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
