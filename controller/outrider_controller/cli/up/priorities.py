"""Drafts and routers run before all else on their cores, as on machines of their own.

Ordinary processes have no real-time priority: a system that shares a core among them lets one finish its turn of some
milliseconds while a message for another lies there. Linux; needs CAP_SYS_NICE or an RLIMIT_RTPRIO. Where that is not
given, all goes on as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import NoReturn

import psutil

from outrider_controller.cli.up.process import ManagedProcess

_DRAFT, _ROUTER = 2, 1
_ROUTER_TITLE = "ray::Router"
_PERIOD_S = 5.0


async def keep_first(processes: Mapping[str, ManagedProcess]) -> NoReturn:
    """Until cancelled: of those that serve, and of what is started in their place."""
    while True:
        await put_first(processes)
        await asyncio.sleep(_PERIOD_S)


async def put_first(processes: Mapping[str, ManagedProcess]) -> None:
    # Loading is not short: what starts does it like all others.
    for name, process in processes.items():
        if process.serving and name.startswith("draft-"):
            go_first(process.pid, _DRAFT)
        elif process.serving and name == "controller":
            for pid in await asyncio.to_thread(_routers, process.pid):
                go_first(pid, _ROUTER)


def go_first(pid: int, priority: int) -> bool:
    """All threads of the process, and those that they start from now on. False where the system does not permit it."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, OSError):
        return False
    return True


def _routers(controller: int) -> list[int]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(controller).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(_ROUTER_TITLE):
                    found.append(child.pid)
    return found
