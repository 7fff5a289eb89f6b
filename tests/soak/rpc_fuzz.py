"""Mutated messages to every RPC of routers, control plane, drafts and targets.

Each has to be answered, with a status that names the caller's fault or none: never INTERNAL or UNKNOWN, of a call or of
one sequence in it, never a crash, and no memory is kept of any.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from outrider.errors import Code
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, sequence_pb2

from tests.route_call import RouteCall
from tests.soak.mutations import directed, mutated
from tests.soak.rpc_services import BARRIER_ID, MODEL, Rpc

OURS = (Code.INTERNAL, Code.UNKNOWN)
"""Codes that say that the fault is the server's."""
_PER_STREAM = 20
_TOO_LATE = "Internal error from Core"
"""What a client's own gRPC makes of a write to a stream that the server has ended meanwhile."""
_TIMEOUT_S = 30.0
_WARM_UP = 2000
_DIRECTED = 400


@dataclass(slots=True)
class Outcome:
    """What became of the messages sent to one RPC."""

    num_messages: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    """Of calls, and of single sequences and calls within a stream."""
    faults: list[str] = field(default_factory=list)
    """What was answered as no message should be."""

    def note(self, code: int, details: str | None, where: str) -> None:
        if details == _TOO_LATE:
            self.codes["ENDED"] += 1
            return
        name = "OK" if code == 0 else Code(code).name
        self.codes[name] += 1
        if code in OURS:
            self.faults.append(f"{where}: {name}: {details}")


async def attack(channel: Any, rpc: Rpc, num_messages: int, seed: int, num_directed: int = 0) -> Outcome:
    """Sends so many, drawn from `seed`, after so many with one field at an edge, and then the messages that they are
    made of, as they are. Raises TimeoutError where an answer does not come."""
    outcome, rng = Outcome(), random.Random(f"{seed}{rpc.path}")
    edges = list(directed(rpc.seeds))
    chosen = rng.sample(edges, min(len(edges), num_directed))
    messages = chain(chosen, islice(mutated(rpc.seeds, rng), num_messages))
    batches = iter(lambda: list(islice(messages, _PER_STREAM)), [])
    for batch in chain(batches, [[message.SerializeToString() for message in rpc.seeds]]):
        async with asyncio.timeout(_TIMEOUT_S):
            if rpc.streams:
                await _attack_stream(channel, rpc, batch, outcome)
            else:
                await asyncio.gather(*(_attack_once(channel, rpc, data, outcome) for data in batch))
        outcome.num_messages += len(batch)
    return outcome


async def _attack_once(channel: Any, rpc: Rpc, data: bytes, outcome: Outcome) -> None:
    try:
        # Also of one that answers once.
        async for _ in channel.unary_stream(rpc.path)(data, timeout=_TIMEOUT_S):
            pass
        outcome.note(0, None, rpc.path)
    except grpc.aio.AioRpcError as error:
        outcome.note(error.code().value[0], error.details(), rpc.path)


async def _attack_stream(channel: Any, rpc: Rpc, batch: list[bytes], outcome: Outcome) -> None:
    """On as many streams as it takes: bytes that do not parse end theirs."""
    for group, readable in _until_unreadable(rpc, batch):
        first = [rpc.begins.SerializeToString()] if rpc.begins is not None else []
        # Not after what ends the stream: grpc.aio makes INTERNAL of a write that comes too late.
        last = [rpc.barrier.SerializeToString()] if readable and rpc.barrier is not None else []
        call: Any = channel.stream_stream(rpc.path)()
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for data in (*first, *group, *last):
                await call.write(data)
            if rpc.barrier is None:
                await call.done_writing()
        try:
            await _until_barrier(call, rpc, outcome)
            outcome.note(0, None, rpc.path)
        except grpc.aio.AioRpcError as error:
            outcome.note(error.code().value[0], error.details(), rpc.path)
        finally:
            call.cancel()


def _until_unreadable(rpc: Rpc, batch: list[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """In groups of which only the last message may be one that does not parse; and whether it parses."""
    group: list[bytes] = []
    for data in batch:
        group.append(data)
        try:
            type(rpc.seeds[0]).FromString(data)
        except DecodeError:
            yield group, False
            group = []
    if group:
        yield group, True


async def _until_barrier(call: Any, rpc: Rpc, outcome: Outcome) -> None:
    while True:
        data = await call.read()
        if data is grpc.aio.EOF:
            return
        reply = rpc.response.FromString(data)
        for name in ("errors", "draft_errors"):
            for error in getattr(reply, name, ()):
                sequence_id = getattr(error, "sequence_id", 0) or getattr(error, "call_id", 0)
                if sequence_id == BARRIER_ID:
                    return
                outcome.note(error.code, error.message, f"{rpc.path} {name}")


@asynccontextmanager
async def undisturbed(address: str) -> AsyncIterator[list[list[int]]]:
    """Asks the router the same again and again within the block. Gives the answers: first what it says alone."""
    answers: list[list[int]] = []
    async with create_channel(address) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)

        async def ask() -> None:
            request = router_pb2.RouteRequest(
                request_id=f"innocent-{len(answers)}",
                model=MODEL,
                prompt_token_ids=[11, 12, 13, 14],
                sampling=sequence_pb2.Sampling(top_p=1),
                stopping=sequence_pb2.Stopping(max_new_tokens=24),
                max_draft_tokens=3,
            )
            rounds = [each async for each in RouteCall(stub, request, _TIMEOUT_S)]
            answers.append([token for each in rounds for token in each.token_ids])

        async def keep_asking() -> None:
            while True:
                await ask()
                await asyncio.sleep(0.1)

        await ask()
        asking = asyncio.create_task(keep_asking())
        try:
            yield answers
            if asking.done():
                asking.result()
        finally:
            asking.cancel()
            await asyncio.wait({asking})


@dataclass(frozen=True, slots=True)
class Services:
    """All of them, in a process of their own."""

    addresses: dict[str, str]
    process: asyncio.subprocess.Process

    async def held_bytes(self) -> int:
        """Its memory, without what has been freed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        return int(await asyncio.wait_for(self.process.stdout.readline(), 120))


@asynccontextmanager
async def services_process(log_path: Path) -> AsyncIterator[Services]:
    with log_path.open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak.rpc_services"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            line = await asyncio.wait_for(child.stdout.readline(), 120)
            yield Services(json.loads(line), child)
        finally:
            child.stdin.close()
            await asyncio.wait_for(child.wait(), 30)


@dataclass(slots=True)
class Slope:
    outcome: Outcome
    grown_bytes: int
    """Held after the messages more than before them."""


async def measure(services: Services, rpc: Rpc, num_messages: int, seed: int, allowed_bytes: int = 0) -> Slope:
    """After a warm-up, in which caches and pools fill. A growth that is not allowed has to show twice: a cache may fill
    later, but what is kept of each message is kept of the next ones too."""
    async with create_channel(services.addresses[rpc.place]) as channel:
        warm = await attack(channel, rpc, min(_WARM_UP, num_messages), seed)
        slope = await _sent(services, channel, rpc, num_messages, seed + 1)
        if slope.grown_bytes >= allowed_bytes:
            first, slope = slope, await _sent(services, channel, rpc, num_messages, seed + 2)
            warm.faults += first.outcome.faults
    slope.outcome.faults += warm.faults
    return slope


async def _sent(services: Services, channel: Any, rpc: Rpc, num_messages: int, seed: int) -> Slope:
    before = await services.held_bytes()
    outcome = await attack(channel, rpc, num_messages, seed, _DIRECTED)
    return Slope(outcome, await services.held_bytes() - before)
