"""How a router or a control plane runs, in a process of its own or in an actor: bound, collected rarely, stopped by
signals. Knows neither of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from signal import Signals
from typing import Protocol, TypeVar

from outrider.rpc.server import STOP_SIGNALS
from outrider.telemetry.logging import configure_logging

log = logging.getLogger(__name__)

T = TypeVar("T")

_BIND_TIMEOUT_S = 5.0
# Few cycles are made on the path of a token, and looking for them among thousands of running requests takes
# milliseconds: it is done as rarely as memory allows.
_GC_THRESHOLDS = (20_000, 20, 50)


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


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now outlives the block, so the collector of cycles does not go through it within: with all that is
    imported, once takes a tenth of a second."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        # Else what is freed as the interpreter ends would count as leaked.
        gc.unfreeze()
