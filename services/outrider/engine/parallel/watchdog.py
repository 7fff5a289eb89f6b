"""Ends the process rather than let it wait for something that will not come.

A rank that waits inside a collective cannot be told anything; ending the process always works, and whoever started the
group starts it again. So: a step that takes too long, a peer that is gone, a starter that is gone, each ends the rank.
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
"""Exit code of a rank whose group cannot go on."""
BEAT, READY = b".", b"R"
"""What a rank writes to who started it: it lives and makes progress; it serves."""

_PERIOD_S = 0.5


def end_process(reason: str) -> None:
    """At once, past everything that could wait."""
    log.error("%s: the group cannot go on", reason)
    logging.shutdown()
    os._exit(EXIT_BROKEN)


class Watchdog:
    """A thread that looks twice a second, and at once when a peer goes."""

    def __init__(
        self,
        peers: Mapping[int, str],
        beat_fd: int,
        step_timeout_s: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        """peers: file descriptors of links, and who is at their other end. beat_fd: a pipe to who started us."""
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
        """The group's end is wanted: whoever goes may go."""
        self._armed = False

    def say_ready(self) -> None:
        """Tells who started us that this rank serves."""
        os.write(self._beat_fd, READY)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is inside must end in time."""
        self._step_since_s = time.monotonic()
        try:
            yield
        finally:
            self._step_since_s = None

    def look(self, wait_s: float) -> str:
        """Waits up to `wait_s` for a reason to end the process; empty when there is none."""
        poll = select.poll()
        for fd in self._peers:
            # Not POLLIN: what peers say is for others to read. A closed end is reported unasked.
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
            # The reader is slow; it will find enough beats when it reads.
            pass
        except OSError:
            if self._armed:
                self._end("who started this group is gone")
