"""A control plane's leader of the plan, with nothing around it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from outrider.metadata import MetadataStore
from outrider.metadata.event_writer import EventWriter
from outrider_controller.control.plan.demand import Demand
from outrider_controller.control.plan.leading import PlanLeader
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def plan_leader(
    store: MetadataStore, worker_id: str = "a", clock: Callable[[], float] = time.time
) -> AsyncIterator[PlanLeader]:
    """It may lead. What it tells is written at the end of the block at the latest."""
    async with EventWriter(store).running() as events:
        yield PlanLeader(worker_id, store, events, Demand(CollectorRegistry()), clock)
