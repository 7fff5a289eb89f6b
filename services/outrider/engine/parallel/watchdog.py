"""Ends a rank's process when it would otherwise wait forever.

A rank that waits inside a collective cannot be interrupted. Ending its process always works, and the supervisor
restarts the group. So a step that takes too long, and the end of a peer or of the supervisor, each end the rank.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""Exit code of a rank whose group cannot continue."""
BEAT, READY = b".", b"R"
"""Bytes that a rank writes to the supervisor: it makes progress; it serves."""

_PERIOD_S = 0.5


def end_process(reason: str) -> None:
    """Ends the process at once, skipping everything that could block."""
    log.error("%s: the group cannot go on", reason)
    logging.shutdown()
    os._exit(EXIT_BROKEN)


class Watchdog:
    """A thread that checks twice a second, and at once when a peer ends."""

    def __init__(
        self,
        peers: Mapping[int, str],
        beat_fd: int,
        step_timeout_s: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        """peers: file descriptors of links → name of the peer. beat_fd: a pipe to the supervisor."""
        self._peers = dict(peers)
        self._beat_fd = beat_fd
        self._step_timeout_s = step_timeout_s
        self._end = end
        self._step_since_s: float | None = None
        self._armed = True
        self._thread = threading.Thread(target=self._run, name="outrider-watchdog", daemon=True)
        os.set_blocking(beat_fd, False)

    def start(self) -> None:
        self._thread.start()

    def disarm(self) -> None:
        """The group is being stopped: peers may end."""
        self._armed = False

    def say_ready(self) -> None:
        """Reports to the supervisor that this rank serves."""
        os.write(self._beat_fd, READY)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The block must end in time."""
        self._step_since_s = time.monotonic()
        try:
            yield
        finally:
            self._step_since_s = None

    def look(self, wait_s: float) -> str:
        """Waits up to `wait_s` for a reason to end the process; empty when there is none."""
        poll = select.poll()
        for fd in self._peers:
            # Not POLLIN: other code reads the peers' messages. poll reports a closed end anyway.
            poll.register(fd, select.POLLRDHUP)
        poll.register(self._beat_fd, 0)
        for fd, _ in poll.poll(wait_s * 1e3):
            return f"{self._peers.get(fd, 'who started this group')} is gone"
        since_s = self._step_since_s
        if since_s is not None and time.monotonic() - since_s > self._step_timeout_s:
            return f"a step takes longer than {self._step_timeout_s:g} s"
        return ""

    def _run(self) -> None:
        while self._armed:
            self._beat()
            reason = self.look(_PERIOD_S)
            if reason and self._armed:
                self._end(reason)
                return

    def _beat(self) -> None:
        try:
            os.write(self._beat_fd, BEAT)
        except BlockingIOError:
            # The pipe is full: a slow reader will find enough beats.
            pass
        except OSError:
            if self._armed:
                self._end("who started this group is gone")
