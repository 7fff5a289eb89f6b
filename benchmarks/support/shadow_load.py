"""What a target's event loop spends on its drafts in a step, over real connections to workers that answer nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc
from outrider.drafting.pool import DraftLeases
from outrider.drafting.tree import DraftTree
from outrider.metadata import LeaseRecord
from outrider.protocol.rounds import SourceTokens
from outrider.protocol.sequence_key import Finish, SequenceKey
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, sequence_pb2, target_pb2, worker_pb2
from outrider.target.drafts.pool import PooledDrafts
from outrider.target.requests.opening import Limits
from outrider.target.requests.report import Committed, TargetReport
from outrider.target.requests.wire import events_of
from outrider.target.step.commit import Outcome
from outrider.target.step.times import Times

_LIMITS = Limits(vocab_size=1000, max_context_len=100_000, block_size=16, num_blocks=10_000, max_sequences=1024)
_PROMPT, _DRAFTED, _ACCEPTED = 200, 4, 2
# Of a target whose step takes that long: what the loop sends is on its way before the next report.
_STEP_S = 0.01


class _Silent(draft_pb2_grpc.DraftServiceServicer):
    """In threads of its own, whose time is not counted."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.num_opened = 0

    def GetInfo(self, request: object, context: object) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_pb2.DraftServiceGetInfoResponse(info=worker_pb2.WorkerInfo(worker_id=self.worker_id))

    def Draft(self, requests: Iterable[draft_pb2.DraftRequest], context: Any) -> Iterator[draft_pb2.DraftResponse]:
        for request in requests:
            self.num_opened += len(request.opens)
        yield from ()


@contextmanager
def _serving(worker: _Silent) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


async def loop_ms(rows: int, followed: int, steps: int) -> list[float]:
    """Processor time of each step's report in milliseconds: `rows` sequences have a draft, of which a candidate follows
    `followed`. Raises TimeoutError."""
    draft, candidate = _Silent("draft"), _Silent("candidate")
    with _serving(draft) as address, _serving(candidate) as shadow:
        leased = {"draft": address, "candidate": shadow}

        async def leases() -> list[LeaseRecord]:
            infos = {name: worker_pb2.WorkerInfo(worker_id=name) for name in leased}
            return [LeaseRecord(infos[name], worker_pb2.WorkerLoad(), at, 1) for name, at in leased.items()]

        ignore: Any = lambda *_: None  # noqa: E731
        drafts = PooledDrafts(_LIMITS, time.monotonic, ignore, ignore, DraftLeases(leases, time.monotonic))
        opens = [_opening(number, address, shadow if number < followed else "") for number in range(rows)]
        message = target_pb2.VerifyRequest(opens=opens)
        drafts.apply(1, message, list(events_of(message, 1, _LIMITS, 0.0)))
        async with asyncio.timeout(30):
            while (draft.num_opened, candidate.num_opened) != (rows, followed):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        found = [await _step(drafts, report) for report in islice(_reports(rows), steps)]
        await drafts.stop()
        return found


async def _step(drafts: PooledDrafts, report: TargetReport) -> float:
    began_s = time.thread_time()
    drafts.take_report(report)
    await asyncio.sleep(_STEP_S)
    return 1000 * (time.thread_time() - began_s)


def _opening(number: int, draft: str, shadow: str) -> sequence_pb2.OpenSequence:
    opening = sequence_pb2.OpenSequence(
        sequence_id=number + 1,
        prompt_token_ids=[7] * _PROMPT,
        mode=sequence_pb2.VERIFICATION_MODE_GREEDY,
        sampling=sequence_pb2.Sampling(top_p=1.0),
        stopping=sequence_pb2.Stopping(max_new_tokens=50_000),
        speculation=sequence_pb2.Speculation(max_draft_tokens=_DRAFTED),
        draft=sequence_pb2.DraftAssignment(worker_id="draft", address=draft, sequence_id=number + 1),
    )
    if shadow:
        assigned = sequence_pb2.DraftAssignment(worker_id="candidate", address=shadow, sequence_id=number + 1)
        opening.shadow_draft.CopyFrom(assigned)
    return opening


def _reports(rows: int) -> Iterator[TargetReport]:
    base_len, source = _PROMPT, SourceTokens("model", False, _DRAFTED, _ACCEPTED + 1, _ACCEPTED)
    while True:
        outcome = Outcome([7] * (_ACCEPTED + 1), _DRAFTED, _ACCEPTED + 1, _ACCEPTED, Finish.NONE)
        draft = DraftTree(base_len, (7,) * _DRAFTED)
        keys = (SequenceKey(1, number + 1) for number in range(rows))
        same = Committed(
            SequenceKey(1, 0), base_len, outcome, draft, range(_ACCEPTED), 0, Times(), 0, 0, sources=[source]
        )
        yield TargetReport(commits=[replace(same, key=key) for key in keys])
        base_len += _ACCEPTED + 1
