"""The drafts of a server in a thread of their own, so that the thread that schedules waits for no network but
while a step runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from outrider.vllm.server.server_drafts import ServerDrafts

log = logging.getLogger(__name__)


class PoolThread:
    """Runs from the beginning. `tell` and `poll` are called by the thread that schedules."""

    def __init__(self, make: Callable[[Callable[[list[Any]], None]], ServerDrafts]) -> None:
        """`make`: with what takes the events that `poll` returns."""
        self._arrived, self._came = deque[Any](), threading.Event()
        self.drafts = make(self._post)
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="outrider drafts", daemon=True)
        self._thread.start()

    def tell(self, action: Callable[[ServerDrafts], None]) -> None:
        """Calls it soon, in the loop's thread, in the order of the calls."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._guarded, action)

    def poll(self) -> Iterator[Any]:
        """What has arrived. Never waits."""
        while self._arrived:
            yield self._arrived.popleft()

    def wait(self, seconds: float) -> bool:
        """At most so long, for something to arrive. Whether it has."""
        self._came.clear()
        return bool(self._arrived) or self._came.wait(seconds)

    def _post(self, events: list[Any]) -> None:
        self._arrived.extend(events)
        self._came.set()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._running is not None and self._running.cancel())
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._running = self._loop.create_task(self.drafts.run())
            self._loop.run_until_complete(self._running)
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("the draft pool has ended: requests are decoded without it")
        finally:
            self._loop.close()

    def _guarded(self, action: Callable[[ServerDrafts], None]) -> None:
        try:
            action(self.drafts)
        except Exception:
            log.exception("a draft could not be told of a request")
