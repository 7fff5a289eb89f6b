"""The HTTP application: reads a body, asks the core, writes the answer. What fails ends as an OpenAI error."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.errors import InvalidRequest, OutriderError
from outrider.gateway.auth import check_model, may_ask
from outrider.gateway.choices import Choices, start_choices
from outrider.gateway.config import Limits
from outrider.gateway.generation import Generator
from outrider.gateway.http import bodies, sse
from outrider.gateway.http.access import guarded, tenant_of
from outrider.gateway.http.errors import HttpError, from_outrider, rename_field
from outrider.gateway.http.schemas import ChatRequest, CompletionRequest, parse
from outrider.gateway.http.shapes import ChatShape, CompletionShape, Shape
from outrider.gateway.requests import Generation
from outrider.rpc.roles import Guard
from outrider.telemetry.context import TraceContext

log = logging.getLogger(__name__)
_CLOSE = {"Connection": "close"}
# A body too large is read on so far and thrown away: a client still sending would not see the answer before a reset.
_READ_ON = 8
Body = CompletionRequest | ChatRequest
Answering = AbstractAsyncContextManager[Choices]


def create_app(core: Generator, limits: Limits, guard: Guard) -> Starlette:
    """The application, for uvicorn or any other ASGI server. Raises Undeclared for a route that lacks its access."""
    listings = _Listings(core)
    routes = [
        Route("/v1/completions", _Endpoint(core, limits, CompletionRequest, CompletionShape), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(core, limits, ChatRequest, ChatShape), methods=["POST"]),
        Route("/v1/models", listings.models),
        Route("/v1/models/{name:path}", listings.model),
        Route("/health", listings.health),
    ]
    return Starlette(
        routes=guarded(routes, guard),
        exception_handlers={HTTPException: _http_exception},
    )


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One of the two endpoints that generate. An ASGI application, so that it decides itself when an answer begins."""

    core: Generator
    limits: Limits
    kind: type[CompletionRequest] | type[ChatRequest]
    shape: type[CompletionShape] | type[ChatShape]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = parse(self.kind, await read_body(request, self.limits))
            answering = self._answering(body, request)
            work = self._stream(body, answering, send) if body.stream else self._whole(body, answering, scope, send)
            await sse.while_connected(receive, work)
        except (sse.ClientLeft, ClientDisconnect):
            return
        except HttpError as error:
            await error.response()(scope, receive, send)

    def _answering(self, body: Body, request: Request) -> Answering:
        return start_choices(
            self.core,
            _generations(body),
            default_max_tokens=body.default_max_tokens,
            trace_context=TraceContext.of(request.headers.items()),
            tenant=tenant_of(request),
        )

    async def _whole(self, body: Body, answering: Answering, scope: Scope, send: Send) -> None:
        try:
            async with answering as choices:
                data = await sse.whole(choices, self._shape(choices.id, choices.model), body.num_choices)
        except Exception as error:
            raise _as_http(error, body) from error
        response = JSONResponse(data, headers={"x-request-id": choices.id})
        await response(scope, _nothing_to_receive, send)

    async def _stream(self, body: Body, answering: Answering, send: Send) -> None:
        """Errors before the first token get their own status; later ones can only be an event in the stream."""
        begun = False
        try:
            async with answering as choices:
                shape = self._shape(choices.id, choices.model)
                async with aclosing(sse.events(choices, shape, include_usage=body.include_usage)) as events:
                    async for event in events:
                        if not begun:
                            await sse.open_stream(send, choices.id)
                            begun = True
                        await sse.send_event(send, event)
            await sse.send_event(send, sse.DONE)
        except Exception as error:
            http_error = _as_http(error, body)
            if not begun:
                raise http_error from error
            await sse.send_event(send, sse.event(http_error.body))
        await sse.close_stream(send)

    def _shape(self, answer_id: str, model: str) -> Shape:
        return self.shape(answer_id, model, int(time.time()))


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, within its limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, f"Content-Type: has to be application/json, not {kind or 'empty'}", param="Content-Type")
    declared = request.headers.get("content-length", "0")
    if "expect" in request.headers and declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read_within(request, limits)
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s"
        raise HttpError(408, message, headers=_CLOSE) from error


async def _read_within(request: Request, limits: Limits) -> bytes:
    body, num_read = bytearray(), 0
    async for part in request.stream():
        num_read += len(part)
        if num_read <= limits.max_body_bytes:
            body += part
        elif num_read > _READ_ON * limits.max_body_bytes:
            break
    if num_read > limits.max_body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> HttpError:
    message = f"the body is larger than the {limits.max_body_bytes} bytes allowed"
    return HttpError(413, message, code="request_too_large", headers=_CLOSE)


def _generations(body: Body) -> list[list[Generation]]:
    try:
        return body.generations()
    except InvalidRequest as error:
        raise rename_field(error, body.field_names) from error


def _as_http(error: Exception, body: Body) -> HttpError:
    if isinstance(error, InvalidRequest):
        return rename_field(error, body.field_names)
    if isinstance(error, OutriderError):
        return from_outrider(error)
    # The message stays here: it may quote the prompt.
    log.error("request failed with %s", type(error).__name__, exc_info=error)
    return HttpError(500, "internal error", "server_error")


async def _nothing_to_receive() -> dict[str, str]:
    raise RuntimeError("the body has been read")


@dataclass(frozen=True, slots=True)
class _Listings:
    core: Generator

    async def models(self, request: Request) -> Response:
        await self.core.catalog.refresh()
        created_s = self.core.catalog.created_s
        tenant = tenant_of(request)
        allowed = [served for served in self.core.catalog.live if may_ask(tenant, served.model)]
        data = [bodies.model(served, created_s) for served in allowed]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            check_model(tenant_of(request), name)
        except OutriderError as error:
            return from_outrider(error).response()
        await self.core.catalog.refresh()
        for served in self.core.catalog.live:
            if served.model == name:
                return JSONResponse(bodies.model(served, self.core.catalog.created_s))
        return HttpError(404, f"model {name!r} is not served here", param="model", code="model_not_found").response()

    async def health(self, request: Request) -> Response:
        """200 while requests are taken and some model is ready; 503 says why not."""
        models = self.core.catalog.ready
        reason = self.core.problem
        body = {"status": reason or "ok", "models": models, "running": self.core.admission.running}
        return JSONResponse(body, status_code=503 if reason else 200)


async def _http_exception(request: Request, error: Exception) -> Response:
    """No such path, or not with that method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return HttpError(error.status_code, message, headers=dict(error.headers or {})).response()
