"""The router with the real draft and target workers and a tiny real model."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from outrider.errors import Unavailable
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.telemetry.logging import JsonFormatter

from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import ENGINE, Fleet, StartReal
from tests.integration.router.test_traces import ended_trace

PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": sequence.Sampling(temperature=0, top_p=1)},
    "coupled": {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95, seed=3), "seeded": True},
}


def request(fleet: Fleet, max_new_tokens: int = 60, **fields: Any) -> router.RouteRequest:
    return fleet.request(PROMPT, max_new_tokens, model="tiny", **fields)


async def sources(fleet: Fleet) -> set[tuple[str, bool]]:
    """Who drafted in the last request, and whether in the target's process, as its trace has it."""
    return {(one.source, one.own) for round_ in (await ended_trace(fleet)).rounds for one in round_.sources}


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_speculation_changes_nothing_but_the_number_of_rounds(real_fleet: Fleet, sampling: str) -> None:
    off = request(real_fleet, speculation=router.SPECULATION_MODE_OFF, **SAMPLINGS[sampling])
    on = request(real_fleet, speculation=router.SPECULATION_MODE_ON, **SAMPLINGS[sampling])
    plain, drafted = await real_fleet.ask(off), await real_fleet.ask_until_drafted(on)
    assert plain.token_ids == drafted.token_ids
    assert len(plain.token_ids) == 60
    assert len(drafted.rounds) < len(plain.rounds)


@pytest.mark.parametrize("sampling", [pytest.param("greedy", marks=pytest.mark.slow), "coupled"])
async def test_without_any_draft_worker_lookups_save_rounds_of_the_same_text(
    start_real: StartReal, sampling: str
) -> None:
    fleet = await start_real("ngram,prediction", draft=False)
    off = request(fleet, speculation=router.SPECULATION_MODE_OFF, **SAMPLINGS[sampling])
    plain = await fleet.ask(off)
    predicted = {"predicted_token_ids": plain.token_ids, **SAMPLINGS[sampling]}
    drafted = await fleet.ask(request(fleet, speculation=router.SPECULATION_MODE_AUTO, **predicted))
    assert drafted.token_ids == plain.token_ids and len(drafted.rounds) < len(plain.rounds) // 2
    assert "prediction" in {source for source, _ in await sources(fleet)}


@pytest.mark.parametrize("sampling", [pytest.param("greedy", marks=pytest.mark.slow), "coupled"])
async def test_lookups_and_a_draft_worker_together_change_no_text_and_each_is_counted_by_its_name(
    start_real: StartReal, sampling: str
) -> None:
    fleet = await start_real("ngram,prediction")
    plain = await fleet.ask(request(fleet, speculation=router.SPECULATION_MODE_OFF, **SAMPLINGS[sampling]))
    half = {"predicted_token_ids": plain.token_ids[30:], **SAMPLINGS[sampling]}
    drafted = await fleet.ask_until_drafted(request(fleet, speculation=router.SPECULATION_MODE_ON, **half))
    assert drafted.token_ids == plain.token_ids and len(drafted.rounds) < len(plain.rounds)
    seen = await sources(fleet)
    assert seen >= {("model", False)}
    assert {own for source, own in seen if source != "model"} <= {True}


async def test_no_line_of_router_target_or_draft_holds_a_token_of_a_prompt(
    start_real: StartReal, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fleet = await start_real()
    prompt = [371, 372, 373, 374, 375, 376]
    answer = await fleet.ask_until_drafted(fleet.request(prompt, model="tiny", speculation=router.SPECULATION_MODE_ON))
    logged = "\n".join(JsonFormatter("test").format(record) for record in caplog.records)
    assert logged
    for tokens in (prompt[:3], answer.token_ids[:3]):
        assert ", ".join(map(str, tokens)) not in logged


async def test_a_target_that_reaches_no_draft_decodes_plainly_and_an_event_says_so(
    real_fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    for target in real_fleet.targets:
        target.drafts.links._connect = lambda address: create_channel("127.0.0.1:1")
    for _ in range(2):
        answer = await real_fleet.ask(request(real_fleet, 300, speculation=router.SPECULATION_MODE_ON))
        assert len(answer.token_ids) == 300
        assert answer.metrics.num_draft_tokens == 0
    # Not for each request, and not at every look for a draft: each target leaves it alone for a while.
    assert 1 <= real_fleet.counter("outrider_fallback_total", reason="draft_unreachable") <= 20
    events = [event for event in await real_fleet.store.events() if event.kind == "draft_lost"]
    assert {event.fields["reason"] for event in events} == {"draft_unreachable"}
    draft_id = real_fleet.drafts[0].info.worker_id
    assert {event.fields["worker_id"] for event in events} == {draft_id}
    lines = [vars(record) for record in caplog.records if "a draft lost a request" in record.message]
    assert {(line["request_id"], line["tenant"], line["worker"]) for line in lines} == {("r1", "t", draft_id)}


async def test_a_draft_whose_stream_to_the_target_breaks_costs_no_token(real_fleet: Fleet) -> None:
    # Long enough that it has not ended when the router hears of the break.
    plain = await real_fleet.ask(request(real_fleet, 300, speculation=router.SPECULATION_MODE_OFF))
    links = [link for target in real_fleet.targets for link in target.drafts.links.by_draft.values()]
    assert not links
    tokens, broken = [], False
    async for response in real_fleet.call(request(real_fleet, 300, speculation=router.SPECULATION_MODE_ON)):
        tokens += response.token_ids
        links = [link for target in real_fleet.targets for link in target.drafts.links.by_draft.values()]
        if links and response.num_drafted and not broken:
            broken = True
            links[0]._task.cancel()
            links[0]._listener.ended(links[0], Unavailable("the connection broke", reason="DRAFT_GONE"))
    assert broken
    assert tokens == plain.token_ids
    assert real_fleet.counter("outrider_fallback_total", reason="draft_lost") == 1


async def test_ratio_mode_is_spoken_by_all_three(real_fleet: Fleet) -> None:
    hot = sequence.Sampling(temperature=0.8, top_p=0.95)
    answer = await real_fleet.ask(request(real_fleet, sampling=hot, speculation=router.SPECULATION_MODE_ON))
    assert len(answer.token_ids) == 60
    assert answer.metrics.num_accepted_draft_tokens > 0
    assert real_fleet.counter("outrider_fallback_total", reason="draft_malformed") == 0


async def test_thirty_two_streams_leave_no_task_and_no_block_behind(real_fleet: Fleet) -> None:
    # So many that both targets have a connection to the draft, which stays.
    await asyncio.gather(*(real_fleet.ask(request(real_fleet)) for _ in range(8)))

    def all_free() -> bool:
        return all(load().num_free_blocks == ENGINE.num_blocks for load in real_fleet.loads)

    await until(all_free)
    tasks = len(asyncio.all_tasks())
    asking = [real_fleet.ask(real_fleet.request(PROMPT[: 1 + i % 9], 8 + i, model="tiny")) for i in range(32)]
    answers = await asyncio.gather(*asking)
    assert [len(answer.token_ids) for answer in answers] == [8 + i for i in range(32)]
    await until(lambda: len(asyncio.all_tasks()) <= tasks and all_free())
    assert not real_fleet.router.dispatcher.table.requests
