"""Errors in OpenAI's form, {"error": {message, type, param, code}}, and in Anthropic's.

A 429 is a tenant's limit: of places in `runtime/places.py`, of quotas in `gateway/tenants/quota_keeper.py`; or an
`Overloaded` of the router.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from outrider.errors import MAX_MESSAGE_CHARS, Code, InvalidRequest, OutriderError

_MAX_PARAM_CHARS = 200
MESSAGES = "/v1/messages"
"""The path of Anthropic's API, and the beginning of the others that it has alone."""
_OF_BOTH = "/v1/models"
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# gRPC code → HTTP status, error type. The reason becomes the code unless OpenAI has a name for it.
STATUSES = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Code.OUT_OF_RANGE: (400, "invalid_request_error"),
    Code.FAILED_PRECONDITION: (400, "invalid_request_error"),
    Code.UNIMPLEMENTED: (400, "invalid_request_error"),
    Code.UNAUTHENTICATED: (401, "authentication_error"),
    Code.PERMISSION_DENIED: (403, "permission_error"),
    Code.NOT_FOUND: (404, "invalid_request_error"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Code.CANCELLED: (499, "request_cancelled"),
    Code.UNAVAILABLE: (503, "service_unavailable"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
# Our reason → OpenAI's code. Others become codes as they are.
_CODES = {
    "INVALID_FIELD": "invalid_value",
    "NOT_SUPPORTED": "unsupported_parameter",
    "UNKNOWN_MODEL": "model_not_found",
}


# Not frozen: context managers set its traceback.
@dataclass(slots=True, eq=False)
class HttpError(Exception):
    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, dict[str, object]]:
        message = self.message[:MAX_MESSAGE_CHARS]
        # The client may have invented the name, as long as its body may be.
        param = self.param and self.param[:_MAX_PARAM_CHARS]
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, object]:
        return {"type": "error", "error": {"type": self._kind, "message": self.message[:MAX_MESSAGE_CHARS]}}

    @property
    def shared_body(self) -> dict[str, object]:
        """What clients of both can read, where it is not known which one asks."""
        return {"type": "error", "error": {**self.body["error"], "type": self._kind}}

    @property
    def _kind(self) -> str:
        """Anthropic's type."""
        return _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")

    def response(self, path: str = "") -> JSONResponse:
        """In the form of the API that has this path."""
        body: dict[str, Any] = self.body
        if path.startswith(MESSAGES):
            body = self.anthropic_body
        elif path.startswith(_OF_BOTH):
            body = self.shared_body
        return JSONResponse(body, status_code=self.status, headers=self.headers)


def unsupported(param: str, message: str) -> HttpError:
    """An option of the OpenAI API that would change the answer and is not served here."""
    return HttpError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def from_outrider(error: OutriderError) -> HttpError:
    status, kind = STATUSES.get(error.code, (500, "server_error"))
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds (RFC 9110, 10.2.3). Never 0, which means at once.
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        # OpenAI's clients read this first.
        headers["Retry-After-Ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))
    # What has no reason of its own was not written for clients.
    has_reason = status != 500 or error.reason != error.default_reason
    message = str(error) if has_reason else "internal error"
    return HttpError(status, message, kind, param=error.field or None, code=_code(error), headers=headers)


def _code(error: OutriderError) -> str:
    if error.code is Code.RESOURCE_EXHAUSTED:
        return "rate_limit_exceeded"
    return _CODES.get(error.reason or "", (error.reason or error.code.name).lower())


def rename_field(error: InvalidRequest, client_name: Callable[[str], str]) -> HttpError:
    """The error under the name the client used for the field."""
    plain = from_outrider(error)
    name = client_name(error.field or "") or None
    return HttpError(plain.status, f"{name}: {error.message}", plain.type, param=name, code=plain.code)
