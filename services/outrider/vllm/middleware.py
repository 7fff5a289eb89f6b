"""The tenant of each request of `vllm serve`: `--middleware outrider.vllm.middleware.Tenants`.

It finds the tenant by the API key, or by a header that the operator trusts, and writes it into the request's
`vllm_xargs`, where the scheduler reads it. What a client writes there in its place is dropped. It admits everybody: to
refuse clients is for vLLM's `--api-key`, or for what stands before it. What only Outrider's gateway can do is refused.
A body is read when vLLM asks for it, and parsed only where it may say something of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request

from outrider.errors import InvalidRequest
from outrider.vllm.server.plugin_config import CONFIG, MAX_DRAFT_TOKENS, TENANT, PluginConfig

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_XARGS, _RECEIPT = "vllm_xargs", "receipt"
_GENERATING = ("/completions", "/completions/batch", "/responses", "/messages", "/generate", "/invocations")
"""Ends of the paths whose requests are mark_body their tenant."""
_PARAMETERS = "/generate"
"""End of those that have it in their sampling parameters."""
_OURS = re.compile(rb"vllm_xargs|extra_args|receipt|\\u00[2-7]|\x00")
"""What a body has that says something of ours, also in an escape or in UTF-16. Others are not parsed."""
_BEARER = "bearer "


class Tenants:
    def __init__(self, app: App) -> None:
        self._app = app
        self._config: PluginConfig | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def mark_body(body: bytes) -> bytes:
            if "form" in headers.get("content-type", "").lower():
                await _check_form(Request(scope, _replayed(body)))
            return self._with_tenant(body, scope, headers)

        request = _Request(mark_body, receive, send)
        try:
            await self._app({**scope, "headers": _unsized(scope["headers"])}, request.receive, request.send)
        except ClientDisconnect:
            if not request.refused:
                raise

    def _with_tenant(self, body: bytes, scope: Message, headers: Mapping[str, str]) -> bytes:
        """The body with the request's tenant. What is no JSON object is left for vLLM to refuse."""
        path = scope["path"]
        tenant = _tenant(self._configuration(scope), headers) if path.endswith(_GENERATING) else ""
        if not _OURS.search(body) and not (tenant and path.endswith(_PARAMETERS)):
            return _spliced(body, tenant) if tenant else body
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body
        if not isinstance(request, dict):
            return body
        if request.get(_RECEIPT):
            raise InvalidRequest(_RECEIPT, "is signed by Outrider's gateway: send the request to one before a target")
        if isinstance(params := request.get("sampling_params"), dict):
            _mark(params, "extra_args", tenant)
        _mark(request, _XARGS, tenant)
        return json.dumps(request).encode()

    def _configuration(self, scope: Message) -> PluginConfig:
        if self._config is None:
            self._config = PluginConfig.of(scope["app"].state.args.additional_config)
        return self._config


class _Request:
    """A request whose body is read when vLLM reads it: after what stands before that, as its check of API keys."""

    def __init__(self, mark_body: Callable[[bytes], Awaitable[bytes]], receive: Receive, send: Send) -> None:
        self._mark_body: Callable[[bytes], Awaitable[bytes]] | None = mark_body
        self._receive, self._send = receive, send
        self.refused = False

    async def receive(self) -> Message:
        if (mark_body := self._mark_body) is None:
            return {"type": "http.disconnect"} if self.refused else await self._receive()
        self._mark_body = None
        try:
            body = await _read(self._receive)
            return {"type": "http.disconnect"} if body is None else _whole(await mark_body(body))
        except InvalidRequest as error:
            self.refused = True
            await _refuse(error, self._send)
            return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        # What vLLM answers to a body that breaks off comes after the refusal.
        if not self.refused:
            await self._send(message)


def _tenant(config: PluginConfig, headers: Mapping[str, str]) -> str:
    """Empty for a client that is no tenant's."""
    if config.tenant_header:
        return headers.get(config.tenant_header.lower(), "")
    given = headers.get("authorization", "")
    key = given[len(_BEARER) :] if given.lower().startswith(_BEARER) else headers.get("x-api-key", "")
    return config.tenant_with(key.strip())


def _mark(request: dict[str, Any], field: str, tenant: str) -> None:
    """Writes the tenant into the arguments in this field. Raises InvalidRequest."""
    given = request.get(field)
    if given is not None and not isinstance(given, dict):
        return
    kept = {name: value for name, value in (given or {}).items() if name not in (TENANT, CONFIG)}
    cap = kept.get(MAX_DRAFT_TOKENS, 0)
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 0:
        raise InvalidRequest(f"{field}.{MAX_DRAFT_TOKENS}", "must be an integer of at least 0")
    if tenant:
        kept[TENANT] = tenant
    if kept or given:
        request[field] = kept


async def _check_form(request: Request) -> None:
    """A form brings audio, and its tenant is not written into it: so a client may write nothing there either. Raises
    InvalidRequest."""
    try:
        async with request.form() as form:
            given = _XARGS in form
    except (HTTPException, MultiPartException):
        # vLLM reads it in the same way, and refuses it.
        return
    if given:
        raise InvalidRequest(_XARGS, "is not taken in a form")


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None when the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _spliced(body: bytes, tenant: str) -> bytes:
    """A JSON object without arguments of its own, with the tenant in them. It is not parsed: what ends with a brace is
    an object, or no JSON with the arguments in it either."""
    start, end, rest = body.rpartition(b"}")
    if not end or rest.strip():
        return body
    comma = b"" if start.rstrip().endswith(b"{") else b","
    return start + comma + json.dumps({_XARGS: {TENANT: tenant}})[1:].encode() + rest


def _whole(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}


def _replayed(body: bytes) -> Receive:
    async def replay() -> Message:
        return _whole(body)

    return replay


def _unsized(headers: Any) -> list[tuple[bytes, bytes]]:
    """The body may be longer when it is read."""
    return [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]


async def _refuse(error: InvalidRequest, send: Send) -> None:
    body = {"message": str(error), "type": "BadRequestError", "param": error.field, "code": 400}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": body}).encode()})
