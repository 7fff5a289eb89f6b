"""The headers `x-ratelimit-*`, as OpenAI names them: what a tenant's quota leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.types import Message, Send

from outrider.gateway.tenants.quota_keeper import QuotaKeeper
from outrider.gateway.tenants.quotas import Remaining
from outrider.rpc.v1 import tenants_pb2


def with_rate_limits(send: Send, quotas: QuotaKeeper, tenant: tenants_pb2.Tenant) -> Send:
    """Adds the headers to the answer, with what is left when it begins."""

    async def send_limited(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = rate_limit_headers(quotas.remaining(tenant))
            message = {**message, "headers": [*message.get("headers", ()), *found]}
        await send(message)

    return send_limited


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
