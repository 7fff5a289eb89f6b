"""The bill is what the workers spent: real workers, a real ledger, requests that end, leave and move."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from outrider.rpc.v1 import router_pb2 as router
from outrider.worker.events import DrainExpired
from outrider_controller.router.config import TraceConfig

from tests.bills import billed, spent
from tests.integration.gateway.scripted_router import until


async def ask(fleet: Any, number: int, chance: random.Random) -> None:
    """Some leave: before the first token, or after some."""
    prompt = [chance.randrange(3, 250) for _ in range(chance.randint(1, 60))]
    request = fleet.request(
        prompt, chance.randint(5, 60), model="tiny", tenant=f"t{number % 3}", speculation=router.SPECULATION_MODE_ON
    )
    leaves_after = chance.choice([None, None, None, 0, 3])
    call, count = fleet.call(request), 0
    with suppress(Exception):
        async for _ in call:
            count += 1
            if leaves_after is not None and count > leaves_after:
                call.cancel()
                return


async def test_every_token_is_billed_once_though_a_trace_forgets_it(fleet: Any) -> None:
    await fleet.target()
    await fleet.draft()
    await fleet.start(traces=TraceConfig())
    answers = await asyncio.gather(*(fleet.ask(fleet.request(max_new_tokens=n)) for n in (1, 7, 40)))
    [(tenant, usage)] = fleet.router.dispatcher.usage.sums.items()
    assert (tenant, usage.requests, usage.prompt_tokens, usage.output_tokens) == ("t", 3, 9, 48)
    assert usage.drafted_tokens == sum(answer.metrics.num_draft_tokens for answer in answers)
    assert usage.accepted_tokens == sum(answer.metrics.num_accepted_draft_tokens for answer in answers)


async def test_tenants_are_billed_what_the_workers_spent(real_fleet: Any) -> None:
    chance = random.Random(1)
    of_workers = [t.stats for t in real_fleet.targets], [d.stats for d in real_fleet.drafts]
    before = spent(*of_workers)
    for wave in range(4):
        asking = [asyncio.create_task(ask(real_fleet, number, chance)) for number in range(8)]
        if wave == 2:
            await asyncio.sleep(0.02)
            # One target gives all back: they go on at the other.
            real_fleet.targets[0].post(DrainExpired())
        await asyncio.gather(*asking)
    await until(lambda: all(load().num_running == 0 for load in real_fleet.loads))
    sums = real_fleet.router.dispatcher.usage.sums
    assert {"t0", "t1", "t2"} == set(sums)

    def missing() -> dict[str, tuple[float, float]]:
        counted = {name: value - before[name] for name, value in spent(*of_workers).items()}
        return {
            name: (value, counted[name])
            for name, value in billed(sums.values()).items()
            # Each commit says its times in whole microseconds, which counts where few commits wasted any.
            if value != pytest.approx(counted[name], rel=0.005, abs=3)
        }

    # What workers say last is on its way.
    with suppress(TimeoutError):
        await until(lambda: not missing())
    assert missing() == {}
    assert sum(each.accepted_tokens for each in sums.values()) > 0
    assert sum(each.draft_useful_us for each in sums.values()) > 0
