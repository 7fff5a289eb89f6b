"""The stream from a server to the router that says how its requests speculate. Lives in an event loop.

While there is no router, it looks for one. A new stream begins with all open sequences.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.rpc.channel import Connect
from outrider.rpc.link import PeerLink
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import attach_pb2, attach_pb2_grpc, sequence_pb2, target_pb2, worker_pb2
from outrider.runtime.supervision import Backoff

_CONNECT_TIMEOUT_S = 5.0
_BEAT_S = 1.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
_ANSWER_BYTES = 16


@dataclass(frozen=True, slots=True)
class RouterReach:
    addresses: Sequence[str]
    connect: Connect
    credential: tuple[tuple[str, str], ...]
    info: worker_pb2.WorkerInfo
    load: Callable[[], worker_pb2.WorkerLoad]


class RouterLink(PeerLink[target_pb2.VerifyRequest, BatchingOutbox[attach_pb2.AttachRequest]]):
    def __init__(
        self, reach: RouterReach, received: Callable[[target_pb2.VerifyRequest], None], changed: Callable[[], None]
    ) -> None:
        super().__init__("router", reach.connect, BatchingOutbox(attach_pb2.AttachRequest))
        self.attached = False
        """Whether a router follows the open sequences."""
        self._reach = reach
        self._on_message = received
        self._changed = changed
        self._open: dict[int, sequence_pb2.OpenSequence] = {}
        """As they would be announced now, by id."""

    async def run(self) -> None:
        await self.keep(itertools.cycle(self._reach.addresses), Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S))

    def open(self, announced: sequence_pb2.OpenSequence) -> None:
        self._open[announced.sequence_id] = announced
        if self.attached:
            self._announce(announced)

    def step(self, response: target_pb2.VerifyResponse) -> None:
        for commit in response.commits:
            if commit.finish_reason:
                self._open.pop(commit.sequence_id, None)
            elif (announced := self._open.get(commit.sequence_id)) is not None:
                announced.committed_token_ids.extend(commit.token_ids)
        if self.attached:
            self.outbox.put(attach_pb2.AttachRequest(step=response))

    def close(self, closed: sequence_pb2.CloseSequence) -> None:
        if self._open.pop(closed.sequence_id, None) is not None and self.attached:
            self.outbox.last(closed.ByteSize()).closes.append(closed)

    def erased(self, num_texts: int) -> None:
        """The answer to the oldest erasure that has none."""
        if self.attached:
            self.outbox.last(_ANSWER_BYTES).erased.add(num_texts=num_texts)

    def _announce(self, announced: sequence_pb2.OpenSequence) -> None:
        self.outbox.last(announced.ByteSize()).opens.append(announced)

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        stub: Any = attach_pb2_grpc.AttachServiceStub(channel)
        self.outbox.put(attach_pb2.AttachRequest(info=self._reach.info, load=self._reach.load()))
        return stub.Attach(metadata=self._reach.credential)

    def _received(self, message: target_pb2.VerifyRequest) -> None:
        self._on_message(message)

    async def _watch(self, call: Any) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            # The router has taken this server.
            await call.wait_for_connection()
        self.attached = True
        self._connected()
        for announced in self._open.values():
            self._announce(announced)
        self._changed()
        while True:
            await asyncio.sleep(_BEAT_S)
            self.outbox.put(attach_pb2.AttachRequest(load=self._reach.load()))

    def _ended(self, why: Exception | None) -> None:
        if self.attached:
            self.attached = False
            self._changed()
