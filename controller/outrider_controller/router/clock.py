"""The clock of everything a router times: its event loop's, so that a simulation's is kept too."""

from __future__ import annotations

import asyncio


def now_us() -> int:
    """Monotonic; of one event loop."""
    return int(asyncio.get_running_loop().time() * 1e6)
