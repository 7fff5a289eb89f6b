"""The control plane's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from signal import Signals

from outrider.metadata import MetadataStore

from outrider_controller.control.api.server import RunningControl, running_control
from outrider_controller.control.config import ControlConfig
from outrider_controller.process import bound


@asynccontextmanager
async def control_process(config: ControlConfig, signals: Sequence[Signals] = ()) -> AsyncIterator[RunningControl]:
    """Runs a control plane until the end of the block."""
    async with (
        MetadataStore.connect(config.metadata_url) as store,
        bound(lambda: running_control(config, store, signals)) as control,
    ):
        yield control
