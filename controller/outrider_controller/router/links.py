"""The connection to one target: one channel, one bidirectional stream, one outbox; reconnects while it is wanted.

Knows nothing of sessions. It reports three things to its owner: up, a reply, down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from outrider.protocol.outbox import Outbox
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import target_pb2 as target
from outrider.rpc.v1 import target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.supervision import Backoff, keep_running, until_first_ends

from outrider_controller.router.config import FailoverConfig, LinkConfig
from outrider_controller.router.pairing import info_problem

log = logging.getLogger(__name__)

Connect = Callable[[str], grpc.aio.Channel]
"""A channel to HOST:PORT. Connects when first used."""


class LinkDown(Exception):
    """The stream is unusable; the message says why."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Whoever the link reports to. Called in the event loop; must neither raise nor block."""

    up: Callable[[TargetLink], None]
    down: Callable[[TargetLink], None]
    replied: Callable[[TargetLink, target.VerifyResponse], None]


class TargetLink:
    """One target, from the lease that named it until `stop`."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        listener: Listener,
        config: LinkConfig,
        failover: FailoverConfig,
        connect: Connect = create_channel,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.outbox: Outbox[target.VerifyRequest] = Outbox(target.VerifyRequest, config.max_message_bytes)
        self.info = worker.WorkerInfo()
        self.load = worker.WorkerLoad()
        self.open_sequences: set[int] = set()
        self.generation = 0
        self.up = False
        self.problem = "not connected yet"
        self._reported = ""
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, well or not."""
        self._listener = listener
        self._config = config
        self._failover = failover
        self._connect = connect
        self._clock = asyncio.get_running_loop().time
        self._received_s = 0.0
        self._task = asyncio.create_task(self._run(), name=f"link {worker_id}")

    @property
    def key(self) -> tuple[str, int]:
        """This worker over this connection: what a sequence that fared badly there avoids."""
        return self.worker_id, self.generation

    @property
    def full(self) -> bool:
        limit = self.info.max_sequences
        return bool(limit) and len(self.open_sequences) >= limit

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff = Backoff(self._config.first_backoff_s, self._config.max_backoff_s)
        await keep_running(self._connect_and_serve, backoff, self._report)

    async def _connect_and_serve(self) -> None:
        async with self._connect(self.address) as channel:
            await self._serve(target_pb2_grpc.TargetServiceStub(channel))

    def _report(self, error: Exception) -> None:
        problem = _problem(error)
        if problem != self._reported:
            unforeseen = None if isinstance(error, _FORESEEN) else error
            log.warning("worker %s at %s: %s", self.worker_id, self.address, problem, exc_info=unforeseen)
        self.problem = self._reported = problem
        self.tried.set()

    async def _serve(self, stub: target_pb2_grpc.TargetServiceAsyncStub) -> None:
        """One connection, from GetInfo to the end of its stream."""
        request = target.TargetServiceGetInfoRequest()
        reply = await stub.GetInfo(request, timeout=self._config.connect_timeout_s)
        problem = info_problem(reply.info, worker.WORKER_ROLE_TARGET, self.worker_id)
        if problem:
            raise LinkDown(problem)
        call = stub.Verify()
        try:
            self._came_up(reply.info, reply.load)
            await until_first_ends(self._read(call), self._write(call), self._watch(stub))
        except Exception as error:
            # Known before the sequences are told that they are lost, and why.
            self.problem = _problem(error)
            raise
        finally:
            call.cancel()
            self._went_down()

    def _came_up(self, info: worker.WorkerInfo, load: worker.WorkerLoad) -> None:
        self.info, self.load = info, load
        self.outbox.clear()
        self.generation += 1
        self.up, self.problem, self._reported = True, "", ""
        self._received_s = self._clock()
        log.info("worker %s at %s: up", self.worker_id, self.address)
        self.tried.set()
        self._listener.up(self)

    def _went_down(self) -> None:
        if not self.up:
            return
        self.up = False
        self.outbox.clear()
        try:
            self._listener.down(self)
        finally:
            self.open_sequences.clear()

    async def _read(self, call: Any) -> None:
        while True:
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise LinkDown(f"stream ended: {await call.details() or await call.code()}")
            if reply is None:
                # What gRPC gives for bytes that do not parse.
                raise LinkDown("a message cannot be read")
            self._received_s = self._clock()
            self._listener.replied(self, reply)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self.outbox.take()
            try:
                await call.write(message)
            except asyncio.InvalidStateError as error:
                raise LinkDown("stream ended while writing") from error

    async def _watch(self, stub: target_pb2_grpc.TargetServiceAsyncStub) -> None:
        """Gives the stream up when it is silent and the worker does not answer either, or silent for too long."""
        failed = 0
        while True:
            await asyncio.sleep(self._failover.stall_after_s / 2)
            if not self.open_sequences:
                # An idle stream has nothing to say: silence counts from the first sequence on.
                self._received_s = self._clock()
            silent_s = self._clock() - self._received_s
            if silent_s < self._failover.stall_after_s:
                failed = 0
                continue
            if silent_s > self._failover.max_silence_s:
                raise LinkDown(f"silent for {silent_s:.0f} s")
            failed = 0 if await self._answers(stub) else failed + 1
            if failed >= self._failover.max_failed_probes:
                raise LinkDown(f"silent for {silent_s:.1f} s, and does not answer")

    async def _answers(self, stub: target_pb2_grpc.TargetServiceAsyncStub) -> bool:
        """Whatever it answers: one that drains, or is not ready for others, still works on what it has."""
        try:
            await stub.GetInfo(target.TargetServiceGetInfoRequest(), timeout=self._failover.probe_timeout_s)
        except grpc.RpcError:
            return False
        return True


_FORESEEN = (LinkDown, grpc.RpcError, TimeoutError)


def _problem(error: Exception) -> str:
    """In words. A broken stream says why in its details, which may be empty; what nobody foresaw is named only."""
    if not isinstance(error, _FORESEEN):
        return type(error).__name__
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return details or type(error).__name__
