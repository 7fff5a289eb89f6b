"""Others may fill the machine's memory: the controller's actors are small, and stay."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.rpc.channel import create_channel

from tests.integration.router.test_actors import address_of, controller


@pytest.mark.slow
async def test_a_full_machine_costs_no_router(metadata_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # From so much on Ray's own monitor kills: more is in use on every machine.
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        async with controller(metadata_url, Path(scratch) / "ray") as process:
            for what in ("control plane", "router"):
                async with create_channel(await address_of(process, what)) as channel:
                    health: Any = health_pb2_grpc.HealthStub(channel)
                    answer = await health.Check(health_pb2.HealthCheckRequest())
                    assert answer.status != health_pb2.HealthCheckResponse.UNKNOWN
