"""The bill is what the workers spent: real workers, a real ledger, requests that end, leave and move."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from outrider.metadata.ledger import TenantUsage
from outrider.rpc.v1 import router_pb2 as router
from outrider.worker.events import DrainExpired


def spent(fleet: Any) -> dict[str, float]:
    """By the workers' own counters."""
    targets, drafts = [t.stats for t in fleet.targets], [d.stats for d in fleet.drafts]
    return {
        "output_tokens": sum(s.num_committed_tokens for s in targets),
        "drafted_tokens": sum(s.num_draft_tokens + s.num_siblings for s in targets),
        "verified_tokens": sum(s.num_verified_tokens + s.num_siblings for s in targets),
        "accepted_tokens": sum(s.num_accepted_tokens for s in targets),
        "target_us": sum(s.busy_s for s in targets) * 1e6,
        "target_wasted_us": sum(s.wasted_s for s in targets) * 1e6,
        "draft_us": sum(s.busy_s for s in drafts) * 1e6,
    }


def billed(sums: TenantUsage) -> dict[str, float]:
    return {
        "output_tokens": sums.output_tokens,
        "drafted_tokens": sums.drafted_tokens,
        "verified_tokens": sums.verified_tokens,
        "accepted_tokens": sums.accepted_tokens,
        "target_us": sums.target_useful_us + sums.target_wasted_us,
        "target_wasted_us": sums.target_wasted_us,
        "draft_us": sums.draft_useful_us + sums.draft_wasted_us,
    }


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


async def test_tenants_are_billed_what_the_workers_spent(real_fleet: Any, eventually: Any) -> None:
    chance = random.Random(1)
    before = spent(real_fleet)
    for wave in range(5):
        asking = [asyncio.create_task(ask(real_fleet, number, chance)) for number in range(10)]
        if wave == 2:
            await asyncio.sleep(0.02)
            # One target gives all back: they go on at the other.
            real_fleet.targets[0].post(DrainExpired())
        await asyncio.gather(*asking)
    await eventually(lambda: all(load().num_running == 0 for load in real_fleet.loads))
    sums = real_fleet.router.dispatcher.usage.sums
    assert {"t0", "t1", "t2"} == set(sums)

    def missing() -> dict[str, tuple[float, float]]:
        total = TenantUsage()
        for each in sums.values():
            total.add(each)
        of_workers = {name: value - before[name] for name, value in spent(real_fleet).items()}
        return {
            name: (value, of_workers[name])
            for name, value in billed(total).items()
            if value != pytest.approx(of_workers[name], rel=0.005)
        }

    # What workers say last is on its way.
    with suppress(TimeoutError):
        await eventually(lambda: not missing())
    assert missing() == {}
    assert sum(each.accepted_tokens for each in sums.values()) > 0
    assert sum(each.draft_useful_us for each in sums.values()) > 0
