"""The connection to one worker: one channel, one bidirectional stream, one outbox; reconnects while it is wanted.

Knows nothing of sessions. It reports three things to its owner: up, a reply, down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from outrider.protocol.outbox import M, Outbox
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.supervision import Backoff, keep_running, until_first_ends

from outrider_controller.router.config import FailoverConfig, LinkConfig
from outrider_controller.router.pairing import info_problem

log = logging.getLogger(__name__)

R = TypeVar("R", draft_pb2.DraftResponse, target_pb2.VerifyResponse)


Connect = Callable[[str], grpc.aio.Channel]
"""A channel to HOST:PORT. Connects when first used."""


class LinkDown(Exception):
    """The stream is unusable; the message says why."""


@dataclass(frozen=True, slots=True)
class Listener(Generic[M, R]):
    """Whoever the link reports to. Called in the event loop; must neither raise nor block."""

    up: Callable[[WorkerLink[M, R]], None]
    down: Callable[[WorkerLink[M, R]], None]
    replied: Callable[[WorkerLink[M, R], R], None]


@dataclass(frozen=True, slots=True)
class Verbs(Generic[M, R]):
    """What differs between a target and a draft."""

    role: worker.WorkerRole.ValueType
    request_type: type[M]
    get_info: Callable[[grpc.aio.Channel, float], Any]
    open_stream: Callable[[grpc.aio.Channel], Any]


def _target_info(channel: grpc.aio.Channel, timeout_s: float) -> Any:
    return target_pb2_grpc.TargetServiceStub(channel).GetInfo(
        target_pb2.TargetServiceGetInfoRequest(), timeout=timeout_s
    )


def _draft_info(channel: grpc.aio.Channel, timeout_s: float) -> Any:
    return draft_pb2_grpc.DraftServiceStub(channel).GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=timeout_s)


TARGET_VERBS: Verbs[target_pb2.VerifyRequest, target_pb2.VerifyResponse] = Verbs(
    worker.WORKER_ROLE_TARGET,
    target_pb2.VerifyRequest,
    _target_info,
    lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify(),
)
DRAFT_VERBS: Verbs[draft_pb2.DraftRequest, draft_pb2.DraftResponse] = Verbs(
    worker.WORKER_ROLE_DRAFT,
    draft_pb2.DraftRequest,
    _draft_info,
    lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Draft(),
)


class WorkerLink(Generic[M, R]):
    """One worker, from the lease that named it until `stop`."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        verbs: Verbs[M, R],
        listener: Listener[M, R],
        config: LinkConfig,
        failover: FailoverConfig,
        connect: Connect = create_channel,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.outbox: Outbox[M] = Outbox(verbs.request_type, config.max_message_bytes)
        self.info = worker.WorkerInfo()
        self.load = worker.WorkerLoad()
        self.open_sequences: set[int] = set()
        self.paired_sequences: set[int] = set()
        """Of the open ones, those of which another hears: nothing is to be expected on this stream."""
        self.generation = 0
        self.up = False
        self.problem = "not connected yet"
        self._reported = ""
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, well or not."""
        self._verbs: Verbs[M, R] = verbs
        self._listener: Listener[M, R] = listener
        self._config = config
        self._failover = failover
        self._connect = connect
        self._clock = asyncio.get_running_loop().time
        self._heard_s = 0.0
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
            await self._serve(channel)

    def _report(self, error: Exception) -> None:
        problem = _problem(error)
        if problem != self._reported:
            unforeseen = None if isinstance(error, _FORESEEN) else error
            log.warning("worker %s at %s: %s", self.worker_id, self.address, problem, exc_info=unforeseen)
        self.problem = self._reported = problem
        self.tried.set()

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """One connection, from GetInfo to the end of its stream."""
        reply = await self._verbs.get_info(channel, self._config.connect_timeout_s)
        problem = info_problem(reply.info, self._verbs.role, self.worker_id)
        if problem:
            raise LinkDown(problem)
        call = self._verbs.open_stream(channel)
        try:
            self._came_up(reply.info, reply.load)
            await until_first_ends(self._read(call), self._write(call), self._watch(channel))
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
        self._heard_s = self._clock()
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
            self.paired_sequences.clear()

    async def _read(self, call: Any) -> None:
        while True:
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise LinkDown(f"stream ended: {await call.details() or await call.code()}")
            if reply is None:
                # What gRPC gives for bytes that do not parse.
                raise LinkDown("a message cannot be read")
            self._heard_s = self._clock()
            self._listener.replied(self, reply)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self.outbox.take()
            try:
                await call.write(message)
            except asyncio.InvalidStateError as error:
                raise LinkDown("stream ended while writing") from error

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Gives the stream up when it is silent and the worker does not answer either, or silent for too long."""
        failed = 0
        while True:
            await asyncio.sleep(self._failover.stall_after_s / 2)
            if not self.open_sequences:
                # An idle stream has nothing to say: silence counts from the first sequence on.
                self._heard_s = self._clock()
            silent_s = self._clock() - self._heard_s
            if silent_s < self._failover.stall_after_s:
                failed = 0
                continue
            # Of those that others hear nothing comes here, also when all is well.
            others_hear = self.open_sequences <= self.paired_sequences
            if silent_s > self._failover.max_silence_s and not others_hear:
                raise LinkDown(f"silent for {silent_s:.0f} s")
            failed = 0 if await self._answers(channel) else failed + 1
            if not failed and others_hear:
                self._heard_s = self._clock()
            if failed >= self._failover.max_failed_probes:
                raise LinkDown(f"silent for {silent_s:.1f} s, and does not answer")

    async def _answers(self, channel: grpc.aio.Channel) -> bool:
        """Whatever it answers: one that drains, or is not ready for others, still works on what it has."""
        try:
            await self._verbs.get_info(channel, self._failover.probe_timeout_s)
        except grpc.RpcError:
            return False
        return True


_FORESEEN = (LinkDown, grpc.RpcError, TimeoutError)


def _problem(error: Exception) -> str:
    """In words. A broken stream says why in its details, which may be empty; what nobody foresaw is named only."""
    if not isinstance(error, _FORESEEN):
        return type(error).__name__
    said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return said or type(error).__name__
