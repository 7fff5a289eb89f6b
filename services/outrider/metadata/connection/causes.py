"""Why a Redis is of no use, in words that say what to do. Never quotes the URL, which may have a password. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

CLUSTER = "it is in cluster mode, which divides keys among servers: name one server, or Sentinels (redis+sentinel://)"
SENTINEL = "it is a Sentinel: redis+sentinel://HOST:PORT/SERVICE"
READ_ONLY = "it is a read-only replica: name the primary, or Sentinels (redis+sentinel://)"
SILENT = "it closes connections without an answer; perhaps it wants TLS (rediss://)"

LOGIN = "it refuses the user or the password"
RIGHTS = "the user lacks rights: `outrider create redis-users` makes users that have them"
NO_TLS = "it does not speak TLS: redis:// in place of rediss://"
NO_ANSWER = "it does not answer in time"
NO_ANSWER_TO_TLS = f"{NO_ANSWER}; perhaps it speaks no TLS (redis:// in place of rediss://)"

_LASTING: tuple[tuple[str, str], ...] = (
    (r"MOVED|CROSSSLOT|CLUSTERDOWN|in cluster mode|same slot|non local key", CLUSTER),
    (r"DB index is out of range|invalid DB index|Invalid Database", "it has no database of the URL's number"),
    (r"NOAUTH|Authentication required", "it wants a login: redis://USER@HOST:PORT?password_file=FILE"),
    (r"WRONGPASS|invalid (username-)?password|without any password|no password is set|AuthenticationError", LOGIN),
    (r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure", NO_TLS),
    (r"CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted (ssl_ca_certs)"),
    (r"CERTIFICATE_REQUIRED", "it wants a certificate (ssl_certfile, ssl_keyfile)"),
)
"""What the server, ssl or redis-py says, and what that means, where only another URL or setting mends it."""
_PASSING: tuple[tuple[str, str], ...] = (
    (r"READONLY|ReadOnlyError|read only replica", READ_ONLY),
    (r"NOPERM|NoPermissionError|no permissions|this user has no", RIGHTS),
    (r"\bOOM\b|OutOfMemoryError|used memory > 'maxmemory'", "its memory is full (maxmemory)"),
    (r"MISCONF", "it cannot write to its disk"),
    (r"MASTERDOWN|Link with MASTER is down", "it is a replica that has lost its primary"),
    (r"LOADING|BusyLoadingError|is loading the dataset", "it still loads its data"),
    (r"NOREPLICAS", "it has too few replicas to take writes"),
    (r"Connection closed by server|Connection reset|Connection lost|0 bytes read|EOF occurred", SILENT),
    (r"Connect call failed|Connection refused|Errno 111|No such file", "nobody listens there"),
    (r"Name or service not known|nodename nor servname|Temporary failure in name", "its name is not known"),
    (r"TimeoutError", NO_ANSWER),
)


def cause(error: BaseException) -> str:
    """In words, or the kind of error."""
    return _means(error, (*_LASTING, *_PASSING)) or type(error).__name__


def lasts(error: BaseException) -> bool:
    """Whether waiting cannot mend it."""
    return _means(error, _LASTING) is not None


def _means(error: BaseException, known: tuple[tuple[str, str], ...]) -> str | None:
    for one in _chain(error):
        text = f"{type(one).__name__} {one}"
        if (means := next((means for said, means in known if re.search(said, text)), None)) is not None:
            return means
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """What happened first says most."""
    if error is not None:
        yield from _chain(error.__cause__ or error.__context__)
        yield error
