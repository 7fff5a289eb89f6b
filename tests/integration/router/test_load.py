"""The fleet that loads a router, with few sequences: what it counts is what passed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.speculation import Speculation
from outrider_controller.router.speculation.controller import SpeculationController

from benchmarks.support.router_load import Load, LoadFailed, measure
from tests.fakes import fake_info
from tests.integration.router.conftest import Fleet

LOAD = Load(sequences=24, seconds=0.5, steps_per_s=60.0, per_target=8, per_draft=12, max_tokens=64)


@pytest.fixture(autouse=True)
def no_long_run_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.support.router_load._SETTLE_S", 0.5)


async def running(fleet: Fleet) -> LeaseRecord:
    router = await fleet.start()
    return LeaseRecord(fake_info(worker.WORKER_ROLE_ROUTER), worker.WorkerLoad(), router.address, os.getpid())


async def test_a_fleet_is_served_with_one_message_per_step_and_way(fleet: Fleet) -> None:
    found = await measure(LOAD, fleet.store, await running(fleet))
    assert (found["targets"], found["drafts"]) == (3, 2)
    assert found["tokens"] > found["commits"] > LOAD.sequences
    # A step of a target is at most one message to each gateway. An answer that begins adds two: accepted, opened.
    steps, messages = found["steps"], found["messages"]
    assert messages["target to router"] == steps
    assert messages["router to gateway"] < 2.2 * steps + 2 * LOAD.sequences
    assert found["to_client_ms"]["p50"] > 0


async def test_what_the_router_refuses_is_told(fleet: Fleet) -> None:
    router = await running(fleet)
    with pytest.raises(LoadFailed, match="INVALID_FIELD"):
        await measure(replace(LOAD, prompt_tokens=0), fleet.store, router)


async def test_where_many_sequences_share_a_step_each_has_its_turn_to_be_thought_over(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: dict[int, list[bool]] = {}
    committed = SpeculationController.committed

    def watched(controller: SpeculationController, *args: Any, **given: Any) -> Speculation | None:
        decided.setdefault(id(controller), []).append(given["decides"])
        return committed(controller, *args, **given)

    monkeypatch.setattr(SpeculationController, "committed", watched)
    load = replace(LOAD, sequences=40, per_target=40, per_draft=40, max_tokens=512)
    await measure(load, fleet.store, await running(fleet))
    # Five turns. In the steps of a prompt's end fewer may commit.
    long = [rounds[10:] for rounds in decided.values() if len(rounds) > 40]
    assert len(long) >= 30
    for rounds in long:
        assert 0.1 < sum(rounds) / len(rounds) < 0.5
