"""Features of 256 sequences at 11,000 tokens a second, as a target sends them to a draft worker in another process,
over loopback with a proxy that adds 5 ms to the round trip."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import torch
from outrider.draft.events import DraftCommitted
from outrider.draft.wire import ProposalLimits, events_of
from outrider.drafting.pool.link import DraftLink, Listener
from outrider.drafting.pool.sequence import PooledSequence
from outrider.drafting.pool.validator import DraftVocabulary
from outrider.drafting.source import Features
from outrider.heads.remote import read, written
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from outrider.sequence.key import SequenceKey
from outrider.sequence.speculation import Speculation
from outrider_controller.cli.up.ports import Ports

from benchmarks.support.delay_proxy import set_round_trip
from tests.unit.target.harness import key, opening

RATE = 11_000
"""Tokens a second."""
_SEQUENCES, _ADDED_MS, _SECONDS = 256, 5.0, 10.0
_PROMPT = 8


def sent_features(width: int) -> dict[str, Any]:
    """`width`: numbers of a position. What came of them."""
    spawning, ports = multiprocessing.get_context("spawn"), Ports()
    port, proxied, control = (ports.claim() for _ in range(3))
    counts = spawning.Array("q", 3)
    server = spawning.Process(target=_serve, args=(port, width, counts), daemon=True)
    server.start()
    argv = sys.executable, "-m", "benchmarks.support.delay_proxy", str(control), f"{proxied}=127.0.0.1:{port}"
    proxy = subprocess.Popen(argv)
    try:
        sent, seconds, cpu_s, ended = asyncio.run(_send((port, control), proxied, width, counts))
    finally:
        proxy.kill()
        server.kill()
    bytes_each = counts[2] / sent
    return {
        "tokens/s": sent / seconds,
        "lost": sent - counts[0] + counts[1] + ended,
        "bytes a token": bytes_each,
        "x the numbers": bytes_each / 2 / width,
        "sender's CPU, us a token": 1e6 * cpu_s / sent,
    }


async def _listening(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            writer.close()
            return


async def _send(others: tuple[int, int], to: int, width: int, counts: Any) -> tuple[int, float, float, int]:
    """Tokens, seconds, processor time, and how often the link ended."""
    for port in others:
        await _listening(port)
    await set_round_trip(others[1], _ADDED_MS)
    ended = list[object]()
    listener = Listener(lambda *_: None, lambda _, error: ended.append(error), lambda _: None)
    link = DraftLink("draft", f"127.0.0.1:{to}", create_channel, listener, ())
    asked, vocabulary = Speculation(4), DraftVocabulary(49152, 1 << 20)
    sequences = [
        PooledSequence.open(
            *(link, number, key(number), opening([5] * _PROMPT, max_new_tokens=1 << 19, speculation=asked), (), asked),
            *(vocabulary, 0),
            reads_features=True,
        )
        for number in range(_SEQUENCES)
    ]
    rows, at, sent = torch.randn(1, width), 0, 0
    began_s, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() - began_s < _SECONDS:
        for one in sequences:
            for part in written(at, rows):
                one.show(_PROMPT + at, Features(part.start, part.rows, first=at == 0))
            one.commit(_PROMPT + at, [7], 0)
        at, sent = at + 1, sent + _SEQUENCES
        await asyncio.sleep(max(0.0, began_s + sent / RATE - time.monotonic()))
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    for _ in range(300):
        if ended or counts[0] >= sent:
            break
        await asyncio.sleep(0.1)
    await link.stop()
    return sent, seconds, cpu_s, len(ended)


def _serve(port: int, width: int, counts: Any) -> None:
    """A draft worker that counts the positions that come, those out of their order, and the bytes of all messages."""

    class Draft(draft_pb2_grpc.DraftServiceServicer):
        async def GetInfo(self, request: Any, context: Any) -> Any:
            return draft_pb2.DraftServiceGetInfoResponse(info=worker_pb2.WorkerInfo(worker_id="draft"))

        async def Draft(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            ends = Counter[SequenceKey]()
            async for request in requests:
                counts[2] += request.ByteSize()
                for event in events_of(request, 1, ProposalLimits(1 << 20, 8), 0.0):
                    if isinstance(event, DraftCommitted) and (features := event.features) is not None:
                        count = len(read(features, width))
                        counts[0] += count
                        counts[1] += ends[event.key] != features.start
                        ends[event.key] = features.start + count
                yield draft_pb2.DraftResponse()

    async def run() -> None:
        server = create_server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server)
        async with serving(server, f"127.0.0.1:{port}", services=[]):
            await asyncio.sleep(3600)

    asyncio.run(run())
