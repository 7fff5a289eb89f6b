"""The router with the real draft and target workers and a tiny real model."""

from __future__ import annotations

import asyncio

import pytest
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence

from tests.integration.router.conftest import ENGINE

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
SAMPLINGS = {
    "greedy": {"sampling": sequence.Sampling(temperature=0, top_p=1)},
    "coupled": {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95, seed=3), "seeded": True},
}


def request(fleet, **fields):
    return fleet.request(PROMPT, 60, model="tiny", **fields)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_speculation_changes_nothing_but_the_number_of_rounds(real_fleet, sampling):
    off = request(real_fleet, speculation=router.SPECULATION_MODE_OFF, **SAMPLINGS[sampling])
    on = request(real_fleet, speculation=router.SPECULATION_MODE_ON, **SAMPLINGS[sampling])
    plain, drafted = await real_fleet.ask(off), await real_fleet.ask(on)
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) == 60
    assert drafted.metrics.num_accepted_draft_tokens > 0
    assert len(drafted.rounds) < len(plain.rounds)


async def test_ratio_mode_is_spoken_by_all_three(real_fleet):
    hot = sequence.Sampling(temperature=0.8, top_p=0.95)
    answer = await real_fleet.ask(request(real_fleet, sampling=hot, speculation=router.SPECULATION_MODE_ON))
    assert len(answer.token_ids) == 60
    assert answer.metrics.num_accepted_draft_tokens > 0
    assert real_fleet.counter("outrider_fallback_total", reason="draft_malformed") == 0


async def test_thirty_two_streams_leave_no_task_and_no_block_behind(real_fleet, eventually):
    await real_fleet.ask(request(real_fleet))

    def all_free():
        return all(load().num_free_blocks == ENGINE.num_blocks for load in real_fleet.loads)

    await eventually(all_free)
    tasks = len(asyncio.all_tasks())
    asking = [real_fleet.ask(real_fleet.request(PROMPT[: 1 + i % 9], 8 + 3 * i, model="tiny")) for i in range(32)]
    answers = await asyncio.gather(*asking)
    assert [len(answer.token_ids) for answer in answers] == [8 + 3 * i for i in range(32)]
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks and all_free())
    assert real_fleet.router.rounds.num_sessions == 0
