"""The HTTP application: reads the body, calls the core, writes the answer. Failures become OpenAI errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import InvalidRequest, OutriderError
from outrider.gateway.config import GatewayLimits, HttpOptions, UnknownFields
from outrider.gateway.generation.answers import Answer, Choices
from outrider.gateway.generation.generation import Generator
from outrider.gateway.generation.requests import Generation
from outrider.gateway.http import sse
from outrider.gateway.http.access import caller_of, guarded, ignored_header, sharing, tenant_of, with_headers
from outrider.gateway.http.anthropic import answers as anthropic
from outrider.gateway.http.anthropic.answers import MessagesWriter
from outrider.gateway.http.anthropic.request import MessagesRequest
from outrider.gateway.http.errors import MESSAGES, HttpError, from_outrider, rename_field
from outrider.gateway.http.openai import bodies
from outrider.gateway.http.openai.responses import ResponsesWriter
from outrider.gateway.http.openai.responses_request import ResponsesRequest
from outrider.gateway.http.openai.schemas import ChatRequest, CompletionRequest, GenerationBody
from outrider.gateway.http.openai.shapes import ChatShape, CompletionShape
from outrider.gateway.http.reading import BodyReader
from outrider.gateway.http.tokens import TokenEndpoints
from outrider.gateway.tenants.admission import Kept
from outrider.gateway.tenants.auth import check_model, may_ask
from outrider.rpc.access.guard import while_admitted
from outrider.rpc.access.roles import Caller, Guard
from outrider.rpc.v1 import tenants_pb2
from outrider.telemetry.context import TraceContext
from outrider.telemetry.vllm_names import Cache, EngineNames

log = logging.getLogger(__name__)
Answering = AbstractAsyncContextManager[Choices]
Caches = Callable[[], Awaitable[Mapping[str, Cache]]]
"""Reads the KV caches of each model's targets."""
_DEFAULTS = HttpOptions()


async def _no_caches() -> Mapping[str, Cache]:
    return {}


def create_app(
    core: Generator,
    limits: GatewayLimits,
    guard: Guard,
    options: HttpOptions = _DEFAULTS,
    caches: Caches = _no_caches,
) -> Starlette:
    """The application, for uvicorn or any other ASGI server. Raises Undeclared for a route that lacks its access."""
    reader = BodyReader(limits, options.unknown_fields is UnknownFields.IGNORE)
    listings, tokens = _Listings(core), TokenEndpoints(core, reader)
    completions, chats = sse.ShapeWriter(CompletionShape), sse.ShapeWriter(ChatShape)
    routes = [
        Route("/v1/completions", _Endpoint(core, reader, CompletionRequest, completions), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(core, reader, ChatRequest, chats), methods=["POST"]),
        Route("/v1/responses", _Endpoint(core, reader, ResponsesRequest, ResponsesWriter()), methods=["POST"]),
        Route(MESSAGES, _Endpoint(core, reader, MessagesRequest, MessagesWriter()), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", tokens.count_tokens, methods=["POST"]),
        Route("/v1/models", listings.models),
        Route("/v1/models/{name:path}", listings.model),
        Route("/health", listings.health),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/version", tokens.version),
        Route("/v1/receipt-key", listings.receipt_key),
        Route("/metrics", _Scraped(core, caches).page if options.api_metrics else _not_served),
    ]
    app = Starlette(
        routes=guarded(routes, guard, core.quotas, core.admission),
        exception_handlers={HTTPException: _http_exception, Exception: _unexpected},
    )
    # It would send a client, with its key, to whatever host the request names.
    app.router.redirect_slashes = False
    return app


def for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets web pages of these origins call, and read refusals too. A page sends its key as a header, so a browser never
    adds a credential by itself.
    """
    if not origins:
        return app
    return CORSMiddleware(app, origins, ("GET", "POST"), allow_headers=("*",), expose_headers=("*",))


class Writer(Protocol):
    """How an endpoint writes answers."""

    async def whole(self, choices: Choices, body: Any) -> dict[str, Any]: ...

    def events(self, choices: Choices, body: Any) -> AsyncGenerator[bytes, None]:
        """All events of a stream. Nothing is yielded before the first token or error."""

    def failed(self, error: HttpError, num_events: int) -> bytes:
        """The last event of a stream that fails after `num_events`."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An endpoint that generates. It is an ASGI application, so that it decides when an answer begins."""

    core: Generator
    reader: BodyReader
    kind: type[GenerationBody]
    writer: Writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await self.reader.read(self.kind, request)
            send = with_headers(send, lambda: ignored_header(body.ignored))
            with self.core.admission.keeping(sharing(request)) as kept:
                answering, about = self._answering(body, request, kept), {"tenant": tenant_of(request).name}
                if body.stream:
                    paced = tenant_of(request).pacing == tenants_pb2.PACING_CONSTANT
                    work = self._stream(body, answering, about, send, paced=paced)
                else:
                    work = self._whole(body, answering, about, send)
                await sse.while_connected(receive, work)
        except (sse.ClientLeft, ClientDisconnect):
            return
        except HttpError as error:
            await error.response(scope["path"])(scope, receive, send)

    def _answering(self, body: GenerationBody, request: Request, kept: Kept) -> Answering:
        generations = _generations(body)
        body.forget()
        answering = self.core.start(
            generations,
            default_max_tokens=body.default_max_tokens,
            trace_context=TraceContext.of(request.headers.items()),
            tenant=tenant_of(request),
            sharing=sharing(request),
        )
        return _for_caller(caller_of(request), answering, len(generations), kept)

    async def _whole(self, body: GenerationBody, answering: Answering, about: dict[str, str], send: Send) -> None:
        """`about`: for log lines."""
        try:
            async with answering as choices:
                about["request_id"] = choices.id
                data = await self.writer.whole(choices, body)
        except Exception as error:
            raise _as_http(error, body, about) from error
        await sse.send_whole(data, choices.id, send)

    async def _stream(
        self, body: GenerationBody, answering: Answering, about: dict[str, str], send: Send, *, paced: bool
    ) -> None:
        """Errors before the headers have their own HTTP status; later ones are events in the stream."""
        stream = sse.PacedStream(send, beat_s=self.core.beat.s) if paced else sse.AnswerEvents(send)
        try:
            async with (
                answering as choices,
                aclosing(self.writer.events(choices, body)) as events,
                stream.kept_open(choices),
            ):
                about["request_id"] = choices.id
                async for event in events:
                    await stream.say(event)
        except Exception as error:
            http_error = _as_http(error, body, about)
            if not stream.opened:
                raise http_error from error
            await stream.say(self.writer.failed(http_error, stream.num_events))
        await stream.close()


@asynccontextmanager
async def _for_caller(
    caller: Caller, answering: AbstractAsyncContextManager[list[Answer]], num_prompts: int, kept: Kept
) -> AsyncIterator[Choices]:
    async with while_admitted(caller), answering as answers:
        yield Choices(answers, num_prompts, kept)


def _generations(body: GenerationBody) -> list[list[Generation]]:
    try:
        return body.generations()
    except InvalidRequest as error:
        raise rename_field(error, body.client_name) from error


def _as_http(error: Exception, body: GenerationBody, about: dict[str, str]) -> HttpError:
    if isinstance(error, InvalidRequest):
        return rename_field(error, body.client_name)
    if isinstance(error, OutriderError):
        return from_outrider(error)
    # The message is not logged, as it may quote the prompt.
    log.error("request failed with %s", type(error).__name__, exc_info=error, extra=about)
    return HttpError(500, "internal error", "server_error")


@dataclass(frozen=True, slots=True)
class _Listings:
    core: Generator

    async def models(self, request: Request) -> Response:
        await self.core.catalog.refresh()
        created_s = self.core.catalog.created_s
        tenant = tenant_of(request)
        allowed = [served for served in self.core.catalog.live if may_ask(tenant, served.model)]
        if "anthropic-version" in request.headers:
            return JSONResponse(anthropic.models(allowed, created_s))
        data = [bodies.model(served, created_s, self.core.catalog.sampling_defaults(served)) for served in allowed]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            check_model(tenant_of(request), name)
        except OutriderError as error:
            return from_outrider(error).response(request.url.path)
        await self.core.catalog.refresh()
        for served in self.core.catalog.live:
            if served.model == name:
                catalog = self.core.catalog
                if "anthropic-version" in request.headers:
                    return JSONResponse(anthropic.model(served, catalog.created_s))
                return JSONResponse(bodies.model(served, catalog.created_s, catalog.sampling_defaults(served)))
        unknown = HttpError(404, f"model {name!r} is not served here", param="model", code="model_not_found")
        return unknown.response(request.url.path)

    async def receipt_key(self, request: Request) -> Response:
        return JSONResponse({"pem": self.core.receipt_key.public_pem})

    async def health(self, request: Request) -> Response:
        """200 while requests are accepted and some model is ready, or may soon be again; else 503 with the reason."""
        catalog, reason = self.core.catalog, self.core.problem
        status = reason or ("ok" if catalog.ready else "waiting for models to come back")
        running = self.core.admission.running
        body = {"status": status, "models": catalog.ready, "awaited": catalog.awaited, "running": running}
        return JSONResponse(body, status_code=503 if reason else 200)


@dataclass(frozen=True, slots=True)
class _Scraped:
    """What pickers of endpoints and dashboards read of an engine of vLLM, at the port where they look."""

    core: Generator
    caches: Caches

    async def page(self, request: Request) -> Response:
        await self.core.catalog.refresh()
        for served in self.core.catalog.live:
            self.core.metrics.show(served.model)
        names = EngineNames(self.core.metrics.registry, await self.caches())
        return Response(generate_latest(names), media_type=CONTENT_TYPE_LATEST)


async def _not_served(request: Request) -> Response:
    return HttpError(404, f"{request.url.path}: is not served without --api-metrics").response()


async def _http_exception(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return HttpError(error.status_code, message, headers=dict(error.headers or {})).response(request.url.path)


async def _unexpected(request: Request, error: Exception) -> Response:
    """The answer to an internal error. Starlette raises the error again, and the server logs it."""
    return HttpError(500, "internal error", "server_error").response(request.url.path)
