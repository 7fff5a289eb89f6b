"""A peer inside the cluster that floods a target, or names addresses that it must not call. Others notice nothing.

What a lying draft costs is in unit/target/test_drafts, a lying target in integration/router/test_faults, mutated
messages in the soak.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2, target_pb2_grpc
from outrider.target.service import TargetServicer

from tests.integration.target.test_server import BY_TORCH, Router, open_sequence, running_target, target
from tests.redis_server import EmbeddedServer

METHOD = "/outrider.rpc.v1.TargetService/Verify"
HONEST = range(1, 9)
MIB = 1 << 20


async def begun(router: Router, tokens: int) -> None:
    """Sequences of an honest router, each with a token."""
    stopping = sp.Stopping(max_new_tokens=tokens)
    await router.send(opens=[open_sequence(number, [5 + number, 6, 7], stopping=stopping) for number in HONEST])
    while len(router.text) < len(HONEST):
        await router.read()


async def undisturbed(
    stub: target_pb2_grpc.TargetServiceAsyncStub, attack: Coroutine[Any, Any, None], tokens: int = 60
) -> None:
    """Runs the attack while honest sequences are under way, and compares their text with what it is without."""
    alone, beside = Router(stub), Router(stub)
    await begun(alone, tokens)
    await alone.finished(*HONEST)
    await begun(beside, tokens)
    attacking = asyncio.create_task(attack)
    await beside.finished(*HONEST)
    await attacking
    assert beside.text == alone.text and not beside.errors
    for router in (alone, beside):
        router.call.cancel()


@asynccontextmanager
async def listener() -> AsyncIterator[tuple[str, list[object]]]:
    """An address that nobody may call, and who did."""
    callers: list[object] = []

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", callers


@pytest.mark.timeout(600)
async def test_thousands_of_openings_that_name_a_foreign_address_call_nobody_and_cost_others_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with (
            target(tiny, engine=BY_TORCH, metadata_url=redis.url) as (servicer, stub),
            listener() as (address, callers),
        ):
            hostile = Router(stub)
            await undisturbed(stub, flood(hostile, range(1, 2001), address))
            assert callers == []
            refused = Counter(error.reason for error in hostile.errors.values())
            assert refused == {"OVERLOADED": 2000 - len(hostile.finish)}
            # What is told after the last answer is not read.
            assert servicer.stats.num_unleased_drafts >= len(hostile.draft_errors) > 0
            hostile.call.cancel()
            await all_free(servicer)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_hundred_thousand_openings_cost_their_own_stream_at_most(tiny: Path, tmp_path: Path) -> None:
    num_openings = num_streams = 0
    with EmbeddedServer.start(tmp_path / "redis") as redis:
        async with (
            target(tiny, engine=BY_TORCH, metadata_url=redis.url) as (servicer, stub),
            listener() as (address, callers),
        ):

            async def attack() -> None:
                nonlocal num_openings, num_streams
                while num_openings < 100_000:
                    # Who is told more than it reads loses its stream, and comes again.
                    hostile, numbers = Router(stub), range(1, 5001)
                    with suppress(grpc.aio.AioRpcError):
                        await flood(hostile, numbers, address)
                    hostile.call.cancel()
                    num_openings, num_streams = num_openings + len(numbers), num_streams + 1

            await undisturbed(stub, attack(), tokens=400)
            assert callers == [] and num_streams == 20
            await all_free(servicer)


async def flood(router: Router, numbers: range, address: str) -> None:
    """All of them are answered, with a text or with an error, unless the stream ends. Raises AioRpcError then."""
    # Some are what a router might send, the others name what a fetcher of URLs would fall for.
    names = (address, f"user@{address}", f"{address}/x", "169.254.169.254:80", "[::ffff:127.0.0.1]:6379", "\0:1")
    reading = asyncio.create_task(read_until_answered(router, len(numbers)))
    try:
        for first in numbers[::500]:
            openings = [
                open_sequence(
                    number,
                    [7, 8, 9],
                    # Long enough for the leases to be read.
                    stopping=sp.Stopping(max_new_tokens=64),
                    draft=sp.DraftAssignment(
                        worker_id="draft-1", address=names[number % len(names)], sequence_id=number
                    ),
                )
                for number in range(first, min(first + 500, numbers.stop))
            ]
            await router.send(opens=openings)
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def read_until_answered(router: Router, num_openings: int) -> None:
    while len(router.finish) + len(router.errors) < num_openings:
        await router.read()


async def all_free(servicer: TargetServicer) -> None:
    """Nothing that a peer opened is left."""
    async with asyncio.timeout(60):
        while servicer.steps.load.num_running or servicer.steps.load.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert servicer.drafts._open == {} and servicer.drafts.links.by_draft == {}


def padded(message: target_pb2.VerifyRequest, size: int) -> bytes:
    """Of exactly so many bytes, by a field that nobody knows."""
    data, head = message.SerializeToString(), b"\xc2\x3e"
    for length_bytes in range(1, 6):
        rest = size - len(data) - len(head) - length_bytes
        if 7 * (length_bytes - 1) <= max(rest, 1).bit_length() - 1 < 7 * length_bytes:
            length = bytes((rest >> 7 * i & 127) | (128 if i + 1 < length_bytes else 0) for i in range(length_bytes))
            return data + head + length + bytes(rest)
    raise AssertionError(size)


@pytest.mark.parametrize(
    "size",
    [
        *(pytest.param(size, marks=pytest.mark.slow) for size in (4 * MIB - 1, 4 * MIB)),
        *(4 * MIB + 1, 32 * MIB, 32 * MIB + 1),
    ],
)
async def test_a_message_is_taken_up_to_its_bound_and_beyond_it_costs_its_own_stream(size: int, tiny: Path) -> None:
    async with running_target(tiny) as (running, stub):

        async def attack() -> None:
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(running.life.address, options=options) as channel:
                call: Any = channel.stream_stream(METHOD)()
                message = padded(target_pb2.VerifyRequest(opens=[open_sequence(1, [7, 8, 9])]), size)
                assert len(message) == size
                await call.write(message)
                if size <= 32 * MIB:
                    assert target_pb2.VerifyResponse.FromString(await asyncio.wait_for(call.read(), 60)).commits
                    call.cancel()
                else:
                    assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.RESOURCE_EXHAUSTED

        await undisturbed(stub, attack())
