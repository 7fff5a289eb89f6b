"""The answering side of a stream, with a queue before it. For handlers that read and write at the same time."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from outrider.errors import DeadlineExceeded

M = TypeVar("M")

# A client that has stopped reading has a write under way for ever.
GRACE_S = 1.0


async def write_answers(outbox: asyncio.Queue[M | None], context: Any) -> None:
    """Writes what comes, until None does."""
    while (message := await outbox.get()) is not None:
        await context.write(message)
        outbox.task_done()


async def write_within(context: Any, message: Any, timeout_s: float) -> None:
    """Raises DeadlineExceeded for a client that takes nothing: its request would hold its place for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise DeadlineExceeded(f"nothing was read for {timeout_s:g} s") from error


async def stop_writing(
    writer: asyncio.Task[None], outbox: asyncio.Queue[M | None], grace_s: float | None = GRACE_S
) -> None:
    """Ends `write_answers` after the message under way, if that ends within `grace_s`, and drops the rest."""
    while not outbox.empty():
        outbox.get_nowait()
    outbox.put_nowait(None)
    await let_end(writer, grace_s)


async def let_end(writer: asyncio.Task[None], grace_s: float | None = GRACE_S) -> None:
    """For one that ends after the message under way.

    Never in the middle of it: gRPC takes one operation at a time, the call's own end is one too, and a client would
    wait for ever for a status that could not be sent.
    """
    # A client that left fails the write under way, and may cancel the handler in here.
    writer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({writer}, timeout=grace_s)
    finally:
        writer.cancel()
