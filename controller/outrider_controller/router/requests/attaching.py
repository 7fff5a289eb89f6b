"""AttachService: servers that take their requests themselves, and ask this router how these speculate.

Such a server is a target that connects by itself. Its requests are watched like all others, so plan, settings, traces
and bills hold for them. The router never places a request there, and nothing fails there when the router does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Literal

import grpc
from outrider.errors import Cancelled, InvalidRequest, NotFound, OutriderError, Overloaded, Unavailable
from outrider.metadata import MetadataStore
from outrider.metadata.workers.directory import check_id
from outrider.metadata.workers.lease_check import worker_problem
from outrider.protocol.convert import mode_from_proto
from outrider.protocol.sequences import spec_from_proto
from outrider.rpc.link import answering, read_message, read_stream
from outrider.rpc.v1 import attach_pb2 as attach
from outrider.rpc.v1 import attach_pb2_grpc
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2 as target
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import until_first_ends
from outrider.tuning import USUAL_TOKENS

from outrider_controller.router.fleet.fleet import TargetLink
from outrider_controller.router.fleet.placement import info_problem
from outrider_controller.router.observe.tracing import now_us
from outrider_controller.router.request.checks import Request
from outrider_controller.router.requests.dispatcher import Dispatcher
from outrider_controller.router.requests.sequences import ActiveRequest

log = logging.getLogger(__name__)

SERVICE = "outrider.rpc.v1.AttachService"
MAX_SERVERS = 256
"""Each has a lease, under an id that it chooses."""
_NOT_TOLD: tuple[Literal["logits", "logprobs", "predicted_token_ids"], ...] = (
    "logits",
    "logprobs",
    "predicted_token_ids",
)
"""Fields of an opening that only a target needs."""


class AttachServicer(attach_pb2_grpc.AttachServiceServicer):
    def __init__(self, dispatcher: Dispatcher, store: MetadataStore, draining: asyncio.Event) -> None:
        self.address = ""
        """Of this router, in the leases of attached servers."""
        self._dispatcher = dispatcher
        self._store = store
        self._draining = draining
        self._servers: dict[str, _Server] = {}

    # Written with `context.write`, as RouteMany.
    async def Attach(self, requests: object, context: Any) -> None:  # type: ignore[override]
        first = await read_message(context)
        if first is grpc.aio.EOF:
            return
        link = self._link(first)
        while (former := self._servers.get(link.worker_id)) is not None:
            # Of the same server: that its connection broke is not known here yet, and its requests are still open.
            await former.replaced()
        if len(self._servers) >= MAX_SERVERS:
            raise Overloaded(f"{MAX_SERVERS} servers are attached to this router", reason="ATTACHED_FULL")
        server = self._servers[link.worker_id] = _Server(self._dispatcher, link)
        attached = self._dispatcher.fleet.attached
        try:
            async with self._store.register(link.info, self.address, lambda: link.load):
                attached[link.worker_id] = link
                # The server takes it as the router's yes.
                await context.send_initial_metadata(())
                async with answering(context, link.outbox) as over:
                    try:
                        server.take(first)
                        await until_first_ends(read_stream(context, server.take), over(), self._drained())
                    finally:
                        await server.end()
        finally:
            attached.pop(link.worker_id, None)
            del self._servers[link.worker_id]
            server.gone.set()

    async def EraseHistory(
        self, request: attach.AttachServiceEraseHistoryRequest, context: object
    ) -> target.EraseHistoryResponse:
        if (server := self._servers.get(request.worker_id)) is None:
            raise NotFound(f"{request.worker_id} is not attached to this router")
        return await server.erase(request.erasure)

    def _link(self, message: attach.AttachRequest) -> TargetLink:
        """Raises InvalidRequest, or Unavailable while this router drains."""
        if self._draining.is_set():
            raise Unavailable("the router is draining", reason="DRAINING")
        info = message.info
        if (problem := info_problem(info, message.load, worker.WORKER_ROLE_TARGET, info.worker_id)) is not None:
            raise InvalidRequest("info", problem)
        try:
            check_id(info.worker_id)
        except ValueError as error:
            raise InvalidRequest("info", str(error)) from None
        if info.worker_id in self._dispatcher.fleet.targets:
            raise InvalidRequest("info.worker_id", "is that of a target of the fleet")
        info.attached = True
        link = TargetLink(info.worker_id, self.address, self._dispatcher.fleet.link_setup.config.max_message_bytes)
        link.came_up(info, message.load)
        return link

    async def _drained(self) -> None:
        await self._draining.wait()


class _Server:
    """One attached server, from its first message to the end of its stream."""

    def __init__(self, dispatcher: Dispatcher, link: TargetLink) -> None:
        self._dispatcher = dispatcher
        self._link = link
        self._requests: set[asyncio.Task[None]] = set()
        self._erasures: deque[asyncio.Future[target.EraseHistoryResponse]] = deque()
        """Those that the server has not answered."""
        self._warned: set[str | None] = set()
        """Reasons for which a request was not followed."""
        self.gone = asyncio.Event()
        """Its stream has ended, and its lease was given back."""

    def take(self, message: attach.AttachRequest) -> None:
        if message.HasField("load"):
            if (problem := worker_problem(self._link.info, message.load)) is not None:
                raise InvalidRequest("load", problem)
            self._link.load = message.load
        for opening in message.opens:
            self._open(opening)
        if message.HasField("step"):
            self._dispatcher.fleet.link_setup.listener.replied(self._link, message.step)
        for close in message.closes:
            self._close(close.sequence_id)
        for answer in message.erased:
            if self._erasures and not (waiting := self._erasures.popleft()).done():
                waiting.set_result(answer)

    async def erase(self, erasure: target.EraseHistoryRequest) -> target.EraseHistoryResponse:
        """Raises Unavailable when the server goes before it answers."""
        waiting: asyncio.Future[target.EraseHistoryResponse] = asyncio.get_running_loop().create_future()
        self._erasures.append(waiting)
        self._link.outbox.last(erasure.ByteSize()).erasures.append(erasure)
        return await waiting

    async def replaced(self) -> None:
        """Ends the stream, and returns once nothing of it is left."""
        self._link.outbox.break_off()
        await self.gone.wait()

    async def end(self) -> None:
        """Ends the requests here; they go on at the server."""
        self._link.went_down()
        for waiting in self._erasures:
            if not waiting.done():
                waiting.set_exception(Unavailable("the server is no longer attached"))
        for sequence_id in tuple(self._link.open_sequences):
            self._close(sequence_id)
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _open(self, opening: sequence.OpenSequence) -> None:
        """From now on its commits count."""
        try:
            request = request_of(opening, self._link.info)
            active = self._adopted(request, opening.sequence_id)
        except OutriderError as error:
            if error.reason not in self._warned:
                self._warned.add(error.reason)
                log.warning("requests of %s are not followed: %s", self._link.worker_id, error)
            return
        task = asyncio.create_task(self._look_after(active), name=f"attached {opening.sequence_id}")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def _adopted(self, request: Request, sequence_id: int) -> ActiveRequest:
        """Raises InvalidRequest for an id that is open already."""
        traces = self._dispatcher.traces
        recorder = traces.start(request, now_us())
        try:
            return self._dispatcher.assigner.adopt(request, self._link, sequence_id, recorder)
        except OutriderError as error:
            traces.end(recorder, error.reason or error.default_reason, now_us())
            raise

    async def _look_after(self, active: ActiveRequest) -> None:
        """Finds drafts for the request until it ends at the server."""
        dispatcher, fault = self._dispatcher, Cancelled.default_reason
        try:
            while active.target is not None and not active.state.finished:
                await dispatcher.assigner.find_draft(active)
                await active.events.next()
        except OutriderError as error:
            fault = error.reason or error.default_reason
        finally:
            dispatcher.end(active, sequence.CLOSE_REASON_CANCELLED)
            dispatcher.traces.end(active.recorder, fault, now_us())

    def _close(self, sequence_id: int) -> None:
        """The request has ended without a finish, or the server is gone."""
        table = self._dispatcher.table
        if (active := table.at_target(self._link, sequence_id)) is not None:
            table.drop_target(active, None)
            active.events.wake()


def request_of(opening: sequence.OpenSequence, info: worker.WorkerInfo) -> Request:
    """The announced request, as if a gateway had sent it. Raises InvalidRequest."""
    for name in _NOT_TOLD:
        opening.ClearField(name)
    request = spec_from_proto(
        Request,
        opening,
        committed=tuple(opening.committed_token_ids),
        mode=mode_from_proto(opening.mode),
        # The server's own: drafts know the prefixes of its requests by it.
        salt=opening.cache_salt,
        model=info.model,
        max_draft_tokens=opening.speculation.max_draft_tokens,
        expected_tokens=min(USUAL_TOKENS, opening.stopping.max_new_tokens),
    )
    request.check(info.vocab_size, info.max_context_len, room=not request.committed)
    return request
