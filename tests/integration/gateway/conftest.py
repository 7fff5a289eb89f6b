"""A gateway on loopback before scripted routers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from outrider.gateway.config import Failover, GatewayConfig, GatewayLimits
from outrider.gateway.server import RunningGateway, running
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.target.grammars.tokenizer import read_tokenizer

OpenGateway = Callable[..., AbstractAsyncContextManager[RunningGateway]]


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> ModelTokenizer:
    return ModelTokenizer.parse(read_tokenizer(tiny))


@pytest.fixture
def gateway(tiny: Path) -> OpenGateway:
    """Opens a gateway: `async with gateway(router_address, ...)`."""

    @asynccontextmanager
    async def opened(
        *routers: str,
        limits: GatewayLimits | None = None,
        failover: Failover | None = None,
        drain_timeout_s: float = 5.0,
        **more: Any,
    ) -> AsyncIterator[RunningGateway]:
        config = GatewayConfig(
            listen_grpc="127.0.0.1:0",
            listen_http="127.0.0.1:0",
            routers=routers,
            limits=limits or GatewayLimits(),
            failover=failover or Failover(window_s=3.0),
            drain_timeout_s=drain_timeout_s,
            **more,
        )
        async with running(config) as started:
            yield started

    return opened
