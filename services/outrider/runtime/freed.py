"""Memory that is free again goes back to the system.

glibc keeps it, each thread's for that thread: a process would hold the most that each of its threads ever had.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from functools import cache

_asked: queue.SimpleQueue[None] = queue.SimpleQueue()


def release_memory() -> None:
    """Now. It takes milliseconds, in which other threads go on."""
    if sys.platform == "linux" and (trim := _trim()) is not None:
        trim(0)


def release_memory_soon() -> None:
    """On a thread. May be called where an object ends, in any thread."""
    _asked.put(None)


@cache
def start_releasing() -> None:
    """Starts the thread, of which there is one."""
    threading.Thread(target=_release, name="release memory", daemon=True).start()


def _release() -> None:
    while True:
        _asked.get()
        release_memory()


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
