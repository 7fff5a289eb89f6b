"""The limit on open files of this process, and so on its connections."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)
_OTHER_FILES = 64
"""Logs, libraries, the event loop, and connections to routers and the metadata store."""


def connections_allowed(asked: int) -> int:
    """Returns `asked`, connections on each of two ports, or fewer, with a warning, if the system allows fewer files.

    Raises the process's soft limit as far as needed: the usual 1024 is there for programs that use select().
    """
    needed = 2 * asked + _OTHER_FILES
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != limit < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = asked if limit == resource.RLIM_INFINITY else max(1, (limit - _OTHER_FILES) // 2)
    if room < asked:
        log.warning("%d files may be open: each port takes %d connections instead of %d", limit, room, asked)
    return min(asked, room)
