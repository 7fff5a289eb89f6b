"""RouterService: translates between gRPC messages and the dispatcher.

A gateway has all its calls on one stream, and receives the results of one engine step in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import grpc
from outrider.errors import InternalError, InvalidRequest, NotFound, OutriderError, Unavailable, UnknownModel
from outrider.limits import MAX_LABEL_CHARS, check_label
from outrider.protocol.errors import to_route_error
from outrider.rpc.interceptor import frames
from outrider.rpc.link import answering, read_stream
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import router_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.runtime.supervision import background, until_first_ends

from outrider_controller.router.config import RouterConfig
from outrider_controller.router.fleet.fleet import Fleet
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.request.checks import Request, check_model_name, check_request
from outrider_controller.router.requests.assignment import no_target_reached
from outrider_controller.router.requests.dispatcher import Dispatcher
from outrider_controller.router.requests.sequences import NewResponse

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
AnswerCall = Callable[[router.RouteCall, NewResponse], Coroutine[Any, Any, None]]
"""Answers one request. Returns after the round that finishes it; raises OutriderError."""

SERVICE = "outrider.rpc.v1.RouterService"
# A response has some hundred bytes, or some thousand for a long commit. Gateways accept 32 MiB.
_RESPONSE_BYTES = 256
# Of the call that passes a tokenizer on.
_TOKENIZER_TIMEOUT_S = 60.0


class GatewayStream:
    """One gateway's calls. A call that fails ends alone; when the stream breaks, all are cancelled."""

    def __init__(self, answer: AnswerCall, broke_off: Callable[[int, int], None], draining: asyncio.Event) -> None:
        """`broke_off`: called with the id of a call of an earlier stream, and the tokens that its gateway has."""
        self._answer = answer
        self._broke_off = broke_off
        self._draining = draining
        self._responses = BatchingOutbox(router.RouteManyResponse)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self, context: Context) -> None:
        """Runs until the gateway ends the stream, or a draining router has answered all requests it took."""
        async with answering(context, self._responses) as over:
            try:
                async with background(self._leave(), "leave gateway"):
                    await until_first_ends(read_stream(context, self._received), over())
            finally:
                tasks = list(self._calls.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _received(self, message: router.RouteManyRequest) -> None:
        for call in message.calls:
            self._begin(call)
        for call_id in message.cancelled:
            if task := self._calls.get(call_id):
                task.cancel()
        for broken in message.broken:
            self._broke_off(broken.call_id, broken.num_tokens)

    async def _leave(self) -> None:
        await self._draining.wait()
        await self._idle.wait()
        self._responses.end()

    def _begin(self, call: router.RouteCall) -> None:
        if call.call_id in self._calls:
            self._fail(call.call_id, InvalidRequest("call_id", "is in use on this stream"))
            return
        task = asyncio.create_task(self._serve(call), name=f"call {call.call_id}")
        self._calls[call.call_id] = task
        self._idle.clear()
        task.add_done_callback(lambda _: self._ended(call.call_id))

    def _ended(self, call_id: int) -> None:
        del self._calls[call_id]
        if not self._calls:
            self._idle.set()

    def _new(self, call_id: int) -> router.RouteResponse:
        response = self._responses.last(_RESPONSE_BYTES).responses.add()
        response.call_id = call_id
        return response

    def _fail(self, call_id: int, error: OutriderError) -> None:
        self._responses.last(_RESPONSE_BYTES).errors.append(to_route_error(call_id, error))

    async def _serve(self, call: router.RouteCall) -> None:
        try:
            await self._answer(call, partial(self._new, call.call_id))
        except OutriderError as error:
            self._fail(call.call_id, error)
        except Exception as error:
            what = type(error).__name__, frames(error)
            log.error("%s while a call was answered\n%s", *what, extra=_of(call.request))
            self._fail(call.call_id, InternalError("internal error"))


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves all of a gateway's requests on one call. An OutriderError ends its own request only."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        telemetry: RouterTelemetry,
        config: RouterConfig,
        salt_key: bytes,
        draining: asyncio.Event,
    ) -> None:
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._ready_timeout_s = config.failover.wait_for_target_s
        self._salt_key = salt_key
        self._draining = draining
        self._num_calls = 0

    # Written with `context.write` and not as a generator: a cancelled call then ends inside its coroutine, at once, and
    # not when the collector finds an abandoned generator.
    async def RouteMany(  # type: ignore[override]
        self, requests: AsyncIterator[router.RouteManyRequest], context: Context
    ) -> None:
        await GatewayStream(self._answer, self._dispatcher.usage.broke_off, self._draining).run(context)

    async def _answer(self, call: router.RouteCall, new_response: NewResponse) -> None:
        """Carries one request to its finish. Raises OutriderError."""
        self._count(1)
        try:
            request = await self._admitted(call.request)
            if request.finish_reason:
                response = new_response()
                response.finish_reason = request.finish_reason
                response.metrics.SetInParent()
            else:
                deadline_s = call.timeout_us / 1e6 if call.timeout_us else None
                await self._dispatcher.run(request, new_response, deadline_s, call.call_id)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_calls += change
        self._telemetry.running(self._num_calls)

    async def _admitted(self, message: router.RouteRequest) -> Request:
        try:
            if self._draining.is_set():
                raise Unavailable("the router is draining", reason="DRAINING")
            return await self._checked(message)
        except OutriderError as error:
            self._telemetry.rejected(message.tenant[:MAX_LABEL_CHARS], error)
            raise

    async def _checked(self, message: router.RouteRequest) -> Request:
        model = check_model_name(message)
        await self._dispatcher.fleet.ready(self._ready_timeout_s)
        info = self._dispatcher.fleet.model_info(model)
        if info is None:
            raise self._unknown(model)
        if self._dispatcher.fleet.cut_off(model):
            # Before the request is accepted: what all routers refuse has an end.
            raise no_target_reached(model)
        return check_request(message, info, self._salt_key)

    def _unknown(self, model: str) -> OutriderError:
        """UnknownModel; but Unavailable before the first target was seen, when no model is known to be missing."""
        if not self._dispatcher.fleet.seen:
            return Unavailable("no model is served at the moment", reason="NO_MODEL", retry_after_s=1.0)
        return UnknownModel(model)

    async def ListModels(self, request: router.ListModelsRequest, context: Context) -> router.ListModelsResponse:
        await self._dispatcher.fleet.ready(self._ready_timeout_s)
        picker = self._dispatcher.picker
        return router.ListModelsResponse(models=picker.models(), awaited_models=picker.awaited_models())

    async def GetTokenizer(
        self, request: router.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[router.GetTokenizerResponse]:
        fleet = self._dispatcher.fleet
        await fleet.ready(self._ready_timeout_s)
        async for chunk in _tokenizer_chunks(fleet, request.model, request.tokenizer_sha256):
            yield router.GetTokenizerResponse(chunk=chunk)

    def load(self) -> worker.WorkerLoad:
        return worker.WorkerLoad(num_running=self._num_calls, draining=self._draining.is_set())


def _of(message: router.RouteRequest) -> dict[str, str]:
    """Fields of a log line about a request that may not be checked yet: those that are no valid label are left out."""
    fields = {}
    for name, value in (("request_id", message.request_id), ("tenant", message.tenant)):
        with suppress(InvalidRequest):
            check_label(name, value)
            fields[name] = value
    return fields


async def _tokenizer_chunks(fleet: Fleet, model: str, sha256: str) -> AsyncIterator[bytes]:
    """From the first live target that has it. Raises NotFound when none has, Unavailable if that target breaks off."""
    for target in fleet.targets.values():
        if target.up and target.info.model == model and target.info.tokenizer_sha256 == sha256:
            break
    else:
        raise NotFound(f"no live target of {model[:200]!r} has this tokenizer", field="tokenizer_sha256")
    setup = fleet.link_setup
    # A separate connection, so that it does not delay the commits on the target's stream.
    async with setup.connect(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = target_pb2.TargetServiceGetTokenizerRequest()
        try:
            async for part in stub.GetTokenizer(request, timeout=_TOKENIZER_TIMEOUT_S, metadata=setup.credential):
                yield part.chunk
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the target broke off: {error.details() or error.code().name}") from error
