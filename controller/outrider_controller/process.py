"""Runs a router or a control plane, in a process of its own or in an actor: binds ports and handles signals.

Independent of both.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from signal import Signals
from typing import Protocol, TypeVar

from outrider.rpc.server import STOP_SIGNALS
from outrider.telemetry.logging import configure_logging

log = logging.getLogger(__name__)

T = TypeVar("T")

_BIND_TIMEOUT_S = 5.0


class Serving(Protocol):
    """What the process needs of the running server."""

    @property
    def draining(self) -> asyncio.Event: ...


def run(name: str, log_format: str, serve: Callable[[Sequence[Signals]], AbstractAsyncContextManager[Serving]]) -> int:
    """Serves until SIGTERM or SIGINT starts the drain; a second one ends the process at once. Returns the exit code."""
    configure_logging(name, log_format)
    try:
        asyncio.run(_until_stopped(serve(STOP_SIGNALS)))
    except (OSError, ValueError) as error:
        print(f"outrider_controller.{name}: {error}", file=sys.stderr)
        return 1
    return 0


async def _until_stopped(serving: AbstractAsyncContextManager[Serving]) -> None:
    async with serving as running:
        await running.draining.wait()
    log.info("drained")


@asynccontextmanager
async def bound(make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Enters a context that binds a port, and retries for a while: the previous process may still hold the port."""
    async with AsyncExitStack() as stack:
        yield await _entered(stack, make)


async def _entered(stack: AsyncExitStack, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    give_up_s = asyncio.get_running_loop().time() + _BIND_TIMEOUT_S
    while True:
        try:
            return await stack.enter_async_context(make())
        except OSError:
            if asyncio.get_running_loop().time() > give_up_s:
                raise
        await asyncio.sleep(0.1)
