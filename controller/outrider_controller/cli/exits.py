"""Exit codes, the same for every command, and what each error means in them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.errors import OutriderError


class ExitCode(enum.IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNAVAILABLE = 5
    TIMEOUT = 6
    DENIED = 7
    INTERRUPTED = 130


HELP = """\b
Exit codes:
  0    done
  1    failed, or what was checked does not hold
  2    an option, an argument or a request is invalid
  3    what was named does not exist
  4    somebody else has changed it meanwhile
  5    no answer, or no free capacity at the moment
  6    took longer than allowed
  7    the credential is missing, or does not permit this
  130  interrupted (Ctrl-C)
"""

_BY_STATUS = {
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "OUT_OF_RANGE": ExitCode.USAGE,
    "UNIMPLEMENTED": ExitCode.USAGE,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "ABORTED": ExitCode.CONFLICT,
    "UNAUTHENTICATED": ExitCode.DENIED,
    "PERMISSION_DENIED": ExitCode.DENIED,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "RESOURCE_EXHAUSTED": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.TIMEOUT,
    "CANCELLED": ExitCode.INTERRUPTED,
}


_HUNG_UP = ("Socket closed", "Connection reset", "handshake failed")
"""What gRPC says of a connection that was accepted and then refused."""


class CommandError(Exception):
    """One clear line for the user, and the exit code. `reason` is UPPER_SNAKE and stable, for programs."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR, *, reason: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.reason = reason or exit_code.name

    @classmethod
    def of(cls, error: OutriderError, asked: str) -> CommandError:
        """What a server answered; `asked` says who was asked, as in 'gateway at 127.0.0.1:8001'."""
        code = _BY_STATUS.get(error.code.name, ExitCode.ERROR)
        message = f"{asked}: {error}"
        if error.reason is None and code is ExitCode.UNAVAILABLE:
            message = f"nobody answers for the {asked}; is it running? (outrider up)"
            if any(said in str(error) for said in _HUNG_UP):
                fit = "TLS or certificates do not fit (OUTRIDER_TLS_DIR, OUTRIDER_GATEWAY_CA), or it has just ended"
                message = f"what answers for the {asked} hangs up: {fit}"
        if error.reason is None and error.code.name == "UNIMPLEMENTED":
            message = f"what answers for the {asked} does not know this call: another process, or another release"
        if error.retry_after_s is not None:
            message += f" (try again in {error.retry_after_s:g} s)"
        return cls(message, code, reason=error.reason or error.code.name)
