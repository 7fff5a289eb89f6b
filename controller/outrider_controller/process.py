"""How a router or a control plane runs, in a process of its own or in an actor: bound, and stopped by signals.

Knows neither of them.
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
    """What runs, as its process sees it."""

    @property
    def draining(self) -> asyncio.Event: ...


def run(name: str, log_format: str, serve: Callable[[Sequence[Signals]], AbstractAsyncContextManager[Serving]]) -> int:
    """Serves until SIGTERM or SIGINT, which start the drain; a second one ends the process at once. Its exit code."""
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
    """Enters what binds a port, and tries again for a while: the process before us may still hold it."""
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
