"""A place before others on the same core, for short work that other machines wait for."""

from __future__ import annotations

import logging
import os

log = logging.getLogger(__name__)

MAX_PRIORITY = 99


def go_first(priority: int) -> bool:
    """The calling thread, and those it starts from now on, run before all that has a lower priority; 0 changes nothing.

    Ordinary processes have none: a system that shares a core among them lets one finish its turn of some milliseconds
    while a message for another lies there. Linux, SCHED_FIFO; needs CAP_SYS_NICE or an RLIMIT_RTPRIO. Where that is not
    given the answer is False, and all goes on as before.
    """
    if not 0 <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority: {priority} is not in 0..{MAX_PRIORITY}")
    if not priority:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, OSError) as error:
        log.info("no real-time priority: %s", error)
        return False
    return True
