"""What can go wrong, in terms a caller can act on. Knows no transport: `rpc/status.py` turns these into gRPC statuses.

A message is shown to the client: never quote a prompt in one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

MAX_MESSAGE_CHARS = 1000
"""Of an error that leaves the process; the rest is cut off."""


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
        """A number that no code has reads as UNKNOWN: a peer may be newer, or lie."""
        return cls.UNKNOWN


class OutriderError(Exception):
    """What went wrong, in terms a caller can act on. The class decides the status code."""

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
        """UPPER_SNAKE, stable, for programs. None: the peer gave no details, as when the transport itself broke."""
        self.field = field
        """Path of the field at fault, when one is."""
        self.retry_after_s = retry_after_s
        """When to try again, if trying again can help."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidRequest(OutriderError, ValueError):
    """A field holds what it must not hold. Of a message, or of a caller's own arguments."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)


class NotSupported(OutriderError):
    """A field asks for something known that this server does not do."""

    code = Code.UNIMPLEMENTED
    default_reason = "NOT_SUPPORTED"

    def __init__(self, field: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, field=field)


class UnknownModel(OutriderError):
    """No live target serves the model of this name."""

    code = Code.NOT_FOUND
    default_reason = "UNKNOWN_MODEL"

    def __init__(self, model: str) -> None:
        super().__init__(f"no model named {model[:200]!r} is served", field="model")


class UnknownRequest(OutriderError):
    """Nothing is known of the request of this id."""

    code = Code.NOT_FOUND
    default_reason = "UNKNOWN_REQUEST"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="request_id")


class NotFound(OutriderError):
    """What was named does not exist."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class Conflict(OutriderError):
    """What was to be changed has been changed by somebody else meanwhile, or stands in the way."""

    code = Code.ABORTED
    default_reason = "CONFLICT"


class Unauthenticated(OutriderError):
    """Nothing says who the caller is, or what does is not valid."""

    code = Code.UNAUTHENTICATED
    default_reason = "INVALID_API_KEY"


class PermissionDenied(OutriderError):
    """The caller is known, and may not do this."""

    code = Code.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class Overloaded(OutriderError):
    """No room now; nothing was started. Trying again later can help."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)


class Unavailable(OutriderError):
    """The one asked cannot do it now (draining, gone, nothing behind it); another may."""

    code = Code.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The caller went away or asked for an end."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class InternalError(OutriderError):
    """A fault of ours."""


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
    """An error as a peer reported it, of the class that stands for `code`."""
    kind = _BY_CODE.get(code, OutriderError)
    error = kind.__new__(kind)
    OutriderError.__init__(error, message, field=field, retry_after_s=retry_after_s)
    error.reason = reason
    error.code = code
    return error
