"""Domain errors that a caller can act on. Knows no transport: `rpc/status.py` turns these into gRPC statuses.

A message is shown to the client: never quote a prompt in one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, TypeVar

MAX_MESSAGE_CHARS = 1000
"""Bound of the message of an error that leaves the process; the rest is cut off."""


class Code(IntEnum):
    """The canonical codes of google.rpc.Code, by their numbers on the wire."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @classmethod
    def _missing_(cls, value: object) -> Code:
        """Unknown numbers read as UNKNOWN: a peer may be newer, or send garbage."""
        return cls.UNKNOWN


class OutriderError(Exception):
    """An error that a caller can act on. The class decides the status code."""

    code: Code = Code.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason: str | None = reason or self.default_reason
        """UPPER_SNAKE, stable, for programs. None: the peer sent no details, for example because the connection
        broke."""
        self.field = field
        """Path of the field at fault, when one is."""
        self.retry_after_s = retry_after_s
        """Delay after which to retry, if a retry can help."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


E = TypeVar("E", bound=Exception)


def without_frames(error: E) -> E:
    """The error, to be kept: it refers no longer to the frames that it came through. Where they refer to what keeps it,
    all their objects would live until the garbage collector comes."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class InvalidRequest(OutriderError, ValueError):
    """An invalid value in a field of a message, or in a caller's arguments."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)


class NotSupported(OutriderError):
    """A field requests a known feature that this server does not support."""

    code = Code.UNIMPLEMENTED
    default_reason = "NOT_SUPPORTED"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, field=field)


class UnknownModel(OutriderError):
    """No live target serves the model of this name."""

    code = Code.NOT_FOUND
    default_reason = "UNKNOWN_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(f"no model named {model[:200]!r} is served", field="model")


class UnknownRequest(OutriderError):
    """There is no request with this id."""

    code = Code.NOT_FOUND
    default_reason = "UNKNOWN_REQUEST"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="request_id")


class NotFound(OutriderError):
    """The named object does not exist."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class Conflict(OutriderError):
    """The object was changed concurrently, or its present state forbids the change."""

    code = Code.ABORTED
    default_reason = "CONFLICT"


class Unauthenticated(OutriderError):
    """The caller has no valid credentials."""

    code = Code.UNAUTHENTICATED
    default_reason = "INVALID_API_KEY"


class PermissionDenied(OutriderError):
    """The caller is known, but may not do this."""

    code = Code.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class Overloaded(OutriderError):
    """No capacity now; nothing was started. A later retry can help."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)


class Unavailable(OutriderError):
    """The process cannot serve this now (draining, gone, no workers); another may."""

    code = Code.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The caller disconnected or cancelled."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class InternalError(OutriderError):
    """A fault in Outrider."""


_BY_CODE: dict[Code, type[OutriderError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        NotSupported,
        UnknownModel,
        Conflict,
        Unauthenticated,
        PermissionDenied,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}


def make_error(
    code: Code,
    message: str,
    *,
    reason: str | None = None,
    field: str | None = None,
    retry_after_s: float | None = None,
) -> OutriderError:
    """A peer's error, as an instance of the class for `code`."""
    kind = _BY_CODE.get(code, OutriderError)
    error = kind.__new__(kind)
    OutriderError.__init__(error, message, field=field, retry_after_s=retry_after_s)
    error.reason = reason
    error.code = code
    return error
