"""Notable events: who came and went, what changed, what was raised. A short shared memory for operators, not a log."""

from __future__ import annotations

import enum
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


class EventKind(enum.StrEnum):
    """Every kind of event there is. The fields that each has are in docs/operations.md."""

    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    """After a drain of its own: it was stopped."""
    WORKER_LOST = "worker_lost"
    """Its lease ended without one."""
    WORKER_CORDONED = "worker_cordoned"
    WORKER_UNCORDONED = "worker_uncordoned"
    WORKER_DRAINED = "worker_drained"
    """An operator asked for that, and nothing runs there any more."""
    TARGET_LOST = "target_lost"
    """A target lost requests, which go on elsewhere."""
    DRAFT_LOST = "draft_lost"
    """A draft lost requests, which go on without it."""
    REVISION_CHANGED = "revision_changed"
    """A request goes on with the same weights in another arithmetic."""
    SPECULATION_CHANGED = "speculation_changed"
    """The plan put a tenant into another mode, or an operator did."""
    WINDOW_BELOW_FLOOR = "window_below_floor"
    """Of a request's last verified draft tokens too few were accepted."""
    LEADER_CHANGED = "leader_changed"
    """Another control plane makes the plan."""
    TENANT_CHANGED = "tenant_changed"
    ALERT_RAISED = "alert_raised"
    ALERT_CLEARED = "alert_cleared"


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    """Grows with time; give the last one to read on after it."""
    kind: str
    """One that this version may not know."""
    fields: dict[str, str]

    @property
    def unix_ms(self) -> int:
        """By the store's clock."""
        return int(self.id.partition("-")[0])


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
