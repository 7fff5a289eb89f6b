"""Whom a target talks to: drafts that hold a lease, at the leased address."""

from __future__ import annotations

import asyncio

import pytest
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2

from tests.unit.target.drafts.test_pool import ADDRESS, KEY, World, assigned, opening, virtual


@pytest.mark.parametrize(
    "named",
    [
        {"address": "elsewhere:22"},
        {"worker_id": "d2"},
        {"worker_id": "d2", "address": "elsewhere:22"},
        {"address": "unix:/run/outrider/redis.sock"},
    ],
    ids=str,
)
def test_only_who_is_leased_is_called_and_only_at_the_leased_address(named: dict[str, str]) -> None:
    @virtual
    async def test(world: World) -> None:
        called: list[str] = []
        connect, world.drafts.links._connect = (
            world.drafts.links._connect,
            lambda address: called.append(address) or connect(address),
        )
        await world.paired(**named)
        assert world.faults == [(90, "DRAFT_UNREACHABLE")], "the router does without this way"
        assert not called and not world.drafts.links.by_draft
        assert world.drafts._stats.num_unleased_drafts == 1
        await world.hear(set_drafts=[assigned(sequence_id=91)])
        assert called == [ADDRESS]

    test()


@virtual
async def test_a_draft_that_was_leased_a_moment_ago_is_found(world: World) -> None:
    world.leased.clear()
    await world.paired()
    assert world.faults == [(90, "DRAFT_UNREACHABLE")]
    world.leased["d1"] = ADDRESS
    await world.hear(set_drafts=[assigned(sequence_id=91)])
    await asyncio.sleep(0.2)
    assert [o.sequence_id for o in world.draft.opens] == [91]


@virtual
async def test_who_lost_its_lease_is_called_no_more_once_that_is_known(world: World) -> None:
    await world.paired()
    world.leased.clear()
    await asyncio.sleep(10)
    await world.hear(opens=[opening(sequence_id=2)], set_drafts=[assigned(2, sequence_id=91)])
    assert world.faults == [(91, "DRAFT_UNREACHABLE")]
    assert [o.sequence_id for o in world.draft.opens] == [90]


@virtual
async def test_thousands_of_names_cost_one_reading_at_a_time_and_no_link(world: World) -> None:
    openings = [opening(sequence_id=number) for number in range(1, 1001)]
    changes = [assigned(number, worker_id=f"d{number + 1}", sequence_id=number) for number in range(1, 1001)]
    for _ in range(3):
        await world.hear(opens=openings, set_drafts=changes)
    assert not world.drafts.links.by_draft and len(world.faults) >= 1000
    assert world.num_reads <= 4


@virtual
async def test_a_sequence_that_ended_while_the_leases_were_read_is_not_opened(world: World) -> None:
    world.apply(target_pb2.VerifyRequest(opens=[opening()], set_drafts=[assigned()]))
    await world.hear(closes=[sequence.CloseSequence(sequence_id=KEY.sequence_id)])
    assert not world.draft.requests and not world.answers
