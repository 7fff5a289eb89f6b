"""Checks every HTTP request against the table of access rights, finds its tenant, and says what its quota leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.gateway.http.errors import from_outrider
from outrider.gateway.tenants.admission import Admission
from outrider.gateway.tenants.auth import default_tenant
from outrider.gateway.tenants.quota_keeper import QuotaKeeper
from outrider.gateway.tenants.quotas import Remaining
from outrider.rpc.access.roles import ANYBODY, ROUTES, Access, Caller, Guard, bearer_token, check_routes
from outrider.rpc.v1 import tenants_pb2

IGNORED = "x-outrider-ignored"
_CALLER = "outrider.caller"
_PLAIN = "[].-_"
_MAX_IGNORED = 32


def guarded(routes: Sequence[Route], guard: Guard, quotas: QuotaKeeper, admission: Admission) -> list[Route]:
    """The routes with access checks. Raises Undeclared for a route without an entry in the table."""
    check_routes(route.path for route in routes)
    for route in routes:
        route.app = _Guarded(route.app, guard, ROUTES[route.path], quotas, admission)
    return list(routes)


def tenant_of(request: Request) -> tenants_pb2.Tenant:
    return caller_of(request).tenant or default_tenant()


def tenant_in(scope: Mapping[str, Any]) -> str:
    """The name of the tenant of a request, as far as it is known."""
    caller: Caller = scope.get(_CALLER, ANYBODY)
    return caller.tenant.name if caller.tenant is not None else ""


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope.get(_CALLER, ANYBODY)
    return caller


def sharing(request: Request) -> str:
    """The caller's name in what callers share."""
    return caller_of(request).sharing(request.client.host if request.client else "")


class _Guarded:
    def __init__(self, app: ASGIApp, guard: Guard, access: Access, quotas: QuotaKeeper, admission: Admission) -> None:
        self._app = app
        self._guard = guard
        self._access = access
        self._quotas = quotas
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._access.open:
            send = self._paced(send, scope)
            headers = Request(scope).headers
            # As Anthropic's clients send it; with both, this is the one that counts there.
            token = headers.get("x-api-key", "").strip() or bearer_token(headers.get("authorization"))
            try:
                scope[_CALLER] = await self._guard.admit(self._access, token)
            except OutriderError as error:
                # Refused before the body is read, so that the body is dropped as it arrives.
                await _refusal(error, scope["path"])(scope, receive, send)
                return
            send = with_rate_limits(send, self._quotas, tenant_of(Request(scope)))
        await self._app(scope, receive, send)

    def _paced(self, send: Send, scope: Scope) -> Send:
        async def send_paced(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                await self._admission.refusing(sharing(Request(scope)))
            await send(message)

        return send_paced


def _refusal(error: OutriderError, path: str) -> ASGIApp:
    refused = from_outrider(error)
    if refused.status == 401:
        refused.headers["WWW-Authenticate"] = "Bearer"
    return refused.response(path)


def with_rate_limits(send: Send, quotas: QuotaKeeper, tenant: tenants_pb2.Tenant) -> Send:
    """Adds the headers to the answer, with what is left when it begins."""
    return with_headers(send, lambda: rate_limit_headers(quotas.remaining(tenant)))


def with_headers(send: Send, headers: Callable[[], Iterable[tuple[bytes, bytes]]]) -> Send:
    """Adds headers to the answer, as they are when it begins."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers()]}
        await send(message)

    return send_more


def ignored_header(ignored: Sequence[str]) -> Iterator[tuple[bytes, bytes]]:
    """Says what was sent and not looked at. The names are a client's: they are quoted, and their number is bounded."""
    if ignored:
        names = [quote(name, safe=_PLAIN) for name in ignored[:_MAX_IGNORED]]
        yield IGNORED.encode(), ", ".join([*names, "..."] if len(ignored) > _MAX_IGNORED else names).encode()


def rate_limit_headers(limits: Mapping[str, Remaining]) -> Iterator[tuple[bytes, bytes]]:
    """`limits`: by `requests` and `tokens`."""
    for name, limit in limits.items():
        values = {"limit": limit.limit, "remaining": limit.remaining, "reset": duration(limit.reset_s)}
        for kind, value in values.items():
            yield f"x-ratelimit-{kind}-{name}".encode(), str(value).encode()


def duration(seconds: float) -> str:
    """6m0s, 1.5s or 20ms, as in OpenAI's headers."""
    ms = max(0, round(1000 * seconds))
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:g}s"
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}" if minutes else rest
