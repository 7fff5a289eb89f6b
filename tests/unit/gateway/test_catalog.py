"""Which models a gateway can answer for, and when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from outrider.gateway.catalog import Catalog
from outrider.rpc.v1 import router_pb2

MODEL = "m"


@dataclass
class Routers:
    """A pool, as a catalog sees it."""

    models: list[router_pb2.ServedModel] = field(default_factory=list)

    async def every(self) -> list[Any]:
        async def list_models(request: Any, timeout: float, metadata: object) -> router_pb2.ListModelsResponse:
            return router_pb2.ListModelsResponse(models=self.models)

        return [SimpleNamespace(stub=SimpleNamespace(ListModels=list_models), credential=())]


async def test_a_configured_tokenizer_is_loaded_while_no_router_serves_yet(tiny: Path) -> None:
    routers = Routers()
    catalog = Catalog(routers, {MODEL: tiny})  # type: ignore[arg-type]
    catalog.preload()
    async with asyncio.timeout(60):
        await asyncio.gather(*(loading.task for loading in catalog._loading.values()))
    await catalog.refresh()
    assert catalog.ready == []
    routers.models.append(router_pb2.ServedModel(model=MODEL, max_context_len=64, vocab_size=384))
    catalog._refreshed_s = float("-inf")
    await catalog.refresh()
    # At once: nothing is left to load.
    assert catalog.ready == [MODEL]
    await catalog.close()
