"""Tasks that must keep running: an exception in one is reported, and the task runs again.

Plain asyncio, independent of the tasks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(slots=True)
class Backoff:
    """Pauses between attempts: each twice as long as the last, up to a limit, and jittered."""

    first_s: float
    max_s: float
    _next_s: float = 0.0

    def pause_s(self) -> float:
        next_s = self._next_s or self.first_s
        self._next_s = min(2 * next_s, self.max_s)
        # Jittered, or all clients of one peer would reconnect at the same instant.
        return next_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = 0.0


async def keep_running(
    attempt: Callable[[], Awaitable[None]], backoff: Backoff, failed: Callable[[Exception], None]
) -> NoReturn:
    """Runs `attempt` again and again until cancelled: at once after it returned, after a pause if it raised.

    `failed` is called with the exception. An attempt that lasted longer than the longest pause resets the pauses.
    """
    clock = asyncio.get_running_loop().time
    while True:
        started_s = clock()
        try:
            await attempt()
        except Exception as error:
            failed(error)
            if clock() - started_s > backoff.max_s:
                backoff.reset()
            await asyncio.sleep(backoff.pause_s())
        else:
            backoff.reset()


async def until_first_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all concurrently until one of them ends, then cancels the others. Raises the exception of that one."""
    tasks = [asyncio.create_task(one, name=getattr(one, "__qualname__", None)) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                # Not cancelled by this code: the caller must not take it for its own cancellation.
                raise RuntimeError(f"{task.get_name()} was cancelled from outside")
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and returns once it has ended. None: there is no task."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs `work` concurrently with the block, and cancels it at the latest when the block is left."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await stop(task)
