"""Paced streams: one frame at each beat, all of one size, so that times and sizes of packets do not tell how many
drafted tokens were accepted (arXiv 2411.01076). A beat is the mean time per token of this gateway's last answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from outrider import tuning

FRAME_BYTES = 512
"""Of an answer without log probabilities."""


@dataclass(slots=True)
class Beat:
    """For the streams that begin now. A stream keeps its beat, because a change would tell of its own answer."""

    s: float = tuning.FIRST_BEAT_S

    def answered(self, s_per_token: float) -> None:
        """0: unknown, as the answer has only one token."""
        if s_per_token:
            s_per_token = min(max(s_per_token, tuning.FIRST_BEAT_S / 10), 10 * tuning.FIRST_BEAT_S)
            self.s += tuning.NEWEST * (s_per_token - self.s)


@dataclass(slots=True)
class Pacer:
    """Sends a frame at each beat, whether there is anything to tell or not."""

    beat_s: float
    send: Callable[[], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _due_s: float = -math.inf
    _task: asyncio.Task[None] | None = None
    _over: bool = False

    async def beat(self) -> None:
        """Waits for the next beat, and sends a frame. The first beat is now; one that is missed is left out."""
        await self.sleep(max(0.0, self._due_s - self.clock()))
        await self.send()
        now_s = self.clock()
        self._due_s = (self._due_s if now_s - self._due_s < self.beat_s else now_s) + self.beat_s

    def check(self) -> None:
        """Raises what sending a frame has raised."""
        if self._task is not None and self._task.done():
            self._task.result()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Within the block every beat sends a frame. A frame is never interrupted."""
        self._task = asyncio.create_task(self._run(), name="pace")
        try:
            yield
        finally:
            self._over = True
            await asyncio.wait({self._task})
        self.check()

    async def _run(self) -> None:
        while not self._over:
            await self.beat()
