"""A request's W3C Trace Context (w3.org/TR/trace-context), passed on unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_MAX_TRACESTATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Two HTTP headers or gRPC metadata entries. Empty if the caller sent no valid ones."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str | bytes]] | None) -> TraceContext:
        """From headers or metadata with lower-case names. Malformed values count as absent, by the standard."""
        found = {key: value for key, value in pairs or () if key in ("traceparent", "tracestate")}
        return cls.named(_text(found.get("traceparent")), _text(found.get("tracestate")))

    @classmethod
    def named(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """From the two values; malformed ones count as absent."""
        if not _valid(traceparent):
            return cls()
        return cls(traceparent, tracestate if _sendable(tracestate) else "")

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, or empty."""
        return self.traceparent[3:35]

    @property
    def headers(self) -> dict[str, str]:
        given = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in given.items() if value}


NO_CONTEXT = TraceContext()


def _valid(traceparent: str) -> bool:
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or traceparent.startswith("ff"):
        return False
    trace_id, span_id, rest = match.groups()
    # Version 00 ends after the flags; later versions may have more.
    return not (rest and traceparent.startswith("00")) and set(trace_id) != {"0"} and set(span_id) != {"0"}


def _text(value: str | bytes | None) -> str:
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else value or ""


def _sendable(tracestate: str) -> bool:
    return tracestate.isascii() and tracestate.isprintable() and len(tracestate) <= _MAX_TRACESTATE_CHARS
