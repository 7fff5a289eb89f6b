"""Limits the rate of repeated warnings, so that a peer cannot fill a disk or hide other messages."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# A bound, because some libraries put values into their messages, so that every record is another kind.
_MAX_KINDS = 1024


@dataclass(slots=True)
class _Window:
    began_s: float
    num_passed: int = 0
    num_suppressed: int = 0


class RateLimit(logging.Filter):
    """For a logger or a handler. Passes warnings and errors of one kind `limit` times in `interval_s`.

    A kind is a logger, a level and a message before its arguments. The first record that passes after suppressed ones
    has their number in its field `num_suppressed`. Levels below warning always pass.
    """

    def __init__(self, limit: int = 10, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = limit
        self._interval_s = interval_s
        self._clock = clock
        self._windows: OrderedDict[tuple[str, int, str], _Window] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        window = self._window((record.name, record.levelno, str(record.msg)))
        if window.num_passed >= self._limit:
            window.num_suppressed += 1
            return False
        window.num_passed += 1
        if window.num_suppressed:
            record.num_suppressed = window.num_suppressed
            window.num_suppressed = 0
        return True

    def _window(self, kind: tuple[str, int, str]) -> _Window:
        now_s = self._clock()
        window = self._windows.setdefault(kind, _Window(now_s))
        self._windows.move_to_end(kind)
        if len(self._windows) > _MAX_KINDS:
            self._windows.popitem(last=False)
        if now_s - window.began_s >= self._interval_s:
            window.began_s, window.num_passed = now_s, 0
        return window
