"""A router's process: the metadata store, the server, and the drain at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from signal import Signals

from outrider.metadata import MetadataStore
from outrider.runtime.collector import gc_frozen

from outrider_controller.process import bound
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.requests.service import RunningRouter, running_router


@asynccontextmanager
async def router_process(config: RouterConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningRouter]:
    """Runs a router until the end of the block, where it drains. One of `signals` starts the drain earlier."""
    async with (
        MetadataStore.connect(config.metadata_url) as store,
        bound(lambda: running_router(config, store, signals)) as router,
    ):
        with gc_frozen():
            try:
                yield router
            finally:
                await router.drain(config.drain_timeout_s)
