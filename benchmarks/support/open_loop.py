"""Open-loop load: requests are sent when they are due, even if earlier ones have not ended; with their results."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from outrider.rpc.options import channel_options
from outrider.rpc.status import from_rpc_error
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2
from outrider.runtime.collector import gc_frozen

from benchmarks.support.paced_fleet import MODEL

PROMPT_TOKENS, ANSWER_TOKENS = 64, 24
_CHANNELS = 4
_MESSAGE_BYTES = 1 << 20
_NUMBERS = random.Random(0)


@dataclass(frozen=True, slots=True)
class Ended:
    """One request. Times count from when it was sent."""

    at_s: float
    """When it ended, by this process's monotonic clock."""
    took_s: float
    late_s: float
    """Delay between due and sent, because this process was busy."""
    first_token_s: float | None
    code: str
    """OK, or gRPC's name of the error."""
    retry_after_s: float | None = None


@dataclass(slots=True)
class Client:
    """A client with its own connections."""

    stubs: Sequence[Any]
    timeout_s: float = 30.0

    async def ask(self, due_s: float) -> Ended:
        sent_s = time.monotonic()
        prompt = [_NUMBERS.randrange(3, 60_000) for _ in range(PROMPT_TOKENS)]
        request = generation_pb2.GenerateRequest(
            model=MODEL,
            tokens=generation_pb2.TokenPrompt(token_ids=prompt),
            options=generation_pb2.GenerationOptions(
                max_tokens=ANSWER_TOKENS, ignore_eos=True, speculation=router_pb2.SPECULATION_MODE_OFF
            ),
        )
        stub = _NUMBERS.choice(self.stubs)
        call = stub.StreamGenerate(generation_pb2.StreamGenerateRequest(request=request), timeout=self.timeout_s)
        first_s, code, retry_after_s = None, "OK", None
        try:
            async for response in call:
                if response.token_ids and first_s is None:
                    first_s = time.monotonic() - sent_s
        except grpc.aio.AioRpcError as error:
            code, retry_after_s = error.code().name, from_rpc_error(error).retry_after_s
        now_s = time.monotonic()
        return Ended(now_s, now_s - sent_s, sent_s - due_s, first_s, code, retry_after_s)

    async def open_loop(self, rate: float, seconds: float) -> list[Ended]:
        """Sends `rate` requests per second at random times (Poisson); returns when the last has ended."""
        due_s, until_s = time.monotonic(), time.monotonic() + seconds
        tasks = []
        while (due_s := due_s + _NUMBERS.expovariate(rate)) < until_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(due_s)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(self, streams: int, seconds: float) -> list[Ended]:
        """Keeps `streams` requests running."""
        until_s = time.monotonic() + seconds

        async def stream() -> list[Ended]:
            ended = []
            while time.monotonic() < until_s:
                ended.append(await self.ask(time.monotonic()))
            return ended

        return [one for ended in await asyncio.gather(*(stream() for _ in range(streams))) for one in ended]


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Client]:
    # Otherwise the channels of a process share connections, whose number of calls is limited.
    options = [*channel_options(_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            for _ in range(_CHANNELS)
        ]
        with gc_frozen():
            yield Client([generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels])


def percentile_ms(seconds: Sequence[float], place: float) -> float | None:
    """By the nearest rank, in milliseconds; None without values."""
    if not seconds:
        return None
    return round(1e3 * sorted(seconds)[math.ceil(place * len(seconds)) - 1], 1)
