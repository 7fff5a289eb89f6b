"""Drafts that die, stall and lie in mid-stream: the text stays the same, and the target does not wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from outrider.rpc.v1 import router_pb2 as router
from outrider_controller.router.config import FailoverConfig, PolicyConfig

from tests.fakes import FakeDraft, FakeTarget
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Fleet
from tests.integration.router.test_faults import PROMPT, collect, tokens, truth


@pytest.mark.parametrize("fault", ["kill", "break_streams", "freeze"])
async def test_losing_the_only_draft_leaves_the_text_as_it_is(fleet: Fleet, fault: str) -> None:
    target = await fleet.target(FakeTarget(step_s=0.005))
    draft = await fleet.draft()
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 200)), 60, getattr(draft, fault))
    assert tokens(rounds) == truth(200)
    assert rounds[-1].metrics.num_accepted_draft_tokens > 0
    off = [s for s in target.settings if s.speculation.max_draft_tokens == 0]
    assert bool(off) or fault == "freeze"


async def test_another_draft_takes_over_with_the_committed_prefix(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.005))
    drafts = [await fleet.draft() for _ in range(2)]
    await fleet.start()

    def kill() -> Any:
        return next(d for d in drafts if d.live).kill()

    request = fleet.request(PROMPT, 300, speculation=router.SPECULATION_MODE_ON)
    rounds = await collect(fleet.call(request), 60, kill)
    assert tokens(rounds) == truth(300)
    m = rounds[-1].metrics
    assert m.num_draft_failovers == 1
    assert sum(r.num_accepted for r in rounds[len(rounds) // 2 :]) > 0
    assert all(d.behind.total() == 0 for d in drafts)
    openings = sorted((d.opens[0] for d in drafts), key=lambda o: len(o.committed_token_ids))
    assert len(openings[1].committed_token_ids) >= 60


async def test_speculation_resumes_when_a_draft_appears(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.005))
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 300)), 30, fleet.draft)
    assert tokens(rounds) == truth(300)
    assert rounds[-1].metrics.num_accepted_draft_tokens > 30
    assert rounds[-1].metrics.num_draft_failovers == 0


async def test_a_silent_draft_is_not_waited_for(fleet: Fleet) -> None:
    """Frozen, it answers nothing: after two rounds the target is told not to hold the sequence back, for good."""
    target = await fleet.target(FakeTarget(step_s=0.005))
    draft = await fleet.draft()
    # So long that only a frozen draft is silent, also on a machine with other work.
    wait_us = 200_000
    await fleet.start(failover=FailoverConfig(stall_after_s=30), policy=PolicyConfig(max_wait_us=wait_us))
    asking = asyncio.create_task(fleet.ask(fleet.request(PROMPT, 200, speculation=router.SPECULATION_MODE_ON)))
    await until(lambda: draft.num_commits > 5)
    await draft.freeze()
    answer = await asking
    assert answer.token_ids == truth(200)
    told = [setting.speculation for setting in target.settings]
    assert any(one.max_draft_tokens and not one.max_wait_us for one in told)
    # It waited in vain once or twice, and perhaps some more until it was told; not in all rounds that were left.
    in_vain = [one for one in answer.rounds if one.timing.wait_us > wait_us / 2]
    assert 1 <= len(in_vain) <= 4 < len(answer.rounds) / 10


async def test_a_slow_draft_is_not_waited_for_longer_than_it_is_worth(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.003))
    await fleet.draft(FakeDraft(delay_s=0.2))
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 200)))
    assert tokens(rounds) == truth(200)
    speculations = [message.speculation for message in (*target.opens, *target.settings)]
    assert any(speculation.max_draft_tokens for speculation in speculations)
    # It takes 200 ms. What a step of 3 ms is worth is far below the 20 ms that are allowed.
    assert all(speculation.max_wait_us <= 10_000 for speculation in speculations)


async def test_a_lying_draft_is_dropped_and_costs_no_text(fleet: Fleet) -> None:
    """What else is a lie: tests/unit/drafting/pool/test_validator.py."""
    target = await fleet.target()
    draft = FakeDraft()

    def corrupt(message: Any) -> Any:
        for each in message.drafts:
            each.token_ids.append(5000)
        return message

    draft.corrupt = corrupt
    await fleet.draft(draft)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 40)))
    assert tokens(rounds) == truth(40)
    assert rounds[-1].metrics.num_draft_tokens == 0
    assert len(draft.opens) == 1
    assert fleet.counter("outrider_fallback_total", reason="draft_malformed") == 1
    assert target.num_accepted == 0


async def test_a_draft_that_keeps_failing_is_given_up_after_a_few_tries(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.005))
    draft = FakeDraft()

    def corrupt(message: Any) -> Any:
        draft.break_streams()
        return message

    draft.corrupt = corrupt
    await fleet.draft(draft)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 300)))
    assert tokens(rounds) == truth(300)
    assert 1 < len(draft.opens) <= 4
