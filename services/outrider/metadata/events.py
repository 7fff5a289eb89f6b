"""Notable events: fallbacks, alerts, rollouts. A short shared memory for operators, not a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_EVENTS = 10_000
_MAX_VALUE_CHARS = 500
_KIND = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_ID = re.compile(r"\d{1,20}-\d{1,20}")
_KIND_FIELD = b"_kind"

FieldValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    """Grows with time; give the last one to read on after it."""
    kind: str
    fields: dict[str, str]


def encode_event(kind: str, fields: Mapping[str, FieldValue]) -> dict[Any, Any]:
    """Raises ValueError for a kind that is no name. Long values are cut."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind: {kind[:80]!r} is not a lower-case name")
    body: dict[Any, Any] = {_KIND_FIELD: kind}
    for name, value in fields.items():
        body[name] = str(value)[:_MAX_VALUE_CHARS]
    return body


def decode_event(event_id: bytes, body: Mapping[bytes, bytes]) -> Event:
    """Raises ValueError when it is none of ours."""
    fields = {name.decode(): value.decode() for name, value in body.items()}
    kind = fields.pop(_KIND_FIELD.decode(), "")
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind: {kind[:80]!r} is not a lower-case name")
    return Event(event_id.decode(), kind, fields)


def check_event_id(event_id: str) -> None:
    if not _ID.fullmatch(event_id):
        raise ValueError(f"since: {event_id[:60]!r} is not an event id")
