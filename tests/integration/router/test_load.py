"""The fleet that loads a router, with few sequences: what it counts is what passed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.testing.workers import simulated_info
from outrider_controller.cli.bench.load import Load, LoadFailed, measure

LOAD = Load(sequences=24, seconds=1.0, per_target=8, per_draft=12, max_tokens=64)


async def running(fleet) -> LeaseRecord:
    router = await fleet.start()
    return LeaseRecord(simulated_info(worker.WORKER_ROLE_ROUTER), worker.WorkerLoad(), router.address, os.getpid())


async def test_a_fleet_is_served_at_its_pace_with_one_message_per_step_and_way(fleet):
    found = await measure(LOAD, fleet.store, await running(fleet))
    assert (found["targets"], found["drafts"]) == (3, 2)
    assert found["tokens"] > found["commits"] > 0.8 * 24 * 30 * found["window_s"]
    # A step of a target is at most one message to each draft and each gateway; answers that begin add their openings.
    steps, messages = found["steps"], found["messages"]
    assert messages["target to router"] == steps
    assert messages["router to draft"] < 3 * steps
    assert messages["router to gateway"] < 2.2 * steps
    assert found["to_client_ms"]["p50"] > 0 and found["to_target_ms"]["p50"] > 0


async def test_what_the_router_refuses_is_told(fleet):
    router = await running(fleet)
    with pytest.raises(LoadFailed, match="INVALID_FIELD"):
        await measure(replace(LOAD, prompt_tokens=0), fleet.store, router)
