"""Notable events: workers that start and stop, changes, errors. A short shared history for operators, not a log."""

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
    """All kinds of events. docs/operations.md lists their fields."""

    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    """It was stopped, and had drained first."""
    WORKER_LOST = "worker_lost"
    """Its lease expired without a drain."""
    LEASE_REFUSED = "lease_refused"
    """A lease cannot be a worker's, and counts for nothing."""
    DRAFT_UNPAIRED = "draft_unpaired"
    """No target can use a draft, because of its tokenizer or protocol."""
    WORKER_CORDONED = "worker_cordoned"
    WORKER_UNCORDONED = "worker_uncordoned"
    WORKER_DRAINED = "worker_drained"
    """Nothing runs there any more after an operator's drain."""
    TARGET_LOST = "target_lost"
    """A target lost requests, which continue elsewhere."""
    DRAFT_LOST = "draft_lost"
    """A draft lost requests, which continue without it."""
    REVISION_CHANGED = "revision_changed"
    """A request continues with the same weights in another arithmetic."""
    SPECULATION_CHANGED = "speculation_changed"
    """The plan put a tenant into another mode, or an operator did."""
    WINDOW_BELOW_FLOOR = "window_below_floor"
    """Too few of a request's last verified tokens were accepted."""
    LEADER_CHANGED = "leader_changed"
    """Another control plane leads."""
    ROLLOUT_CHANGED = "rollout_changed"
    """A rollout of a draft was started or ended, by an operator or by its evidence."""
    TENANT_CHANGED = "tenant_changed"
    ALERT_RAISED = "alert_raised"
    ALERT_CLEARED = "alert_cleared"


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    """Grows with time; pass the last one to read the events after it."""
    kind: str
    """This version may not know it."""
    fields: dict[str, str]

    @property
    def unix_ms(self) -> int:
        """By the store's clock."""
        return int(self.id.partition("-")[0])


def encode_event(kind: str, fields: Mapping[str, FieldValue]) -> dict[Any, Any]:
    """Raises ValueError for a kind that is no name. Truncates long values."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind: {kind[:80]!r} is not a lower-case name")
    body: dict[Any, Any] = {_KIND_FIELD: kind}
    for name, value in fields.items():
        body[name] = str(value)[:_MAX_VALUE_CHARS]
    return body


def decode_event(event_id: bytes, body: Mapping[bytes, bytes]) -> Event:
    """Raises ValueError if it is not one of our events."""
    fields = {name.decode(): value.decode() for name, value in body.items()}
    kind = fields.pop(_KIND_FIELD.decode(), "")
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind: {kind[:80]!r} is not a lower-case name")
    return Event(event_id.decode(), kind, fields)


def check_event_id(event_id: str) -> None:
    if not _ID.fullmatch(event_id):
        raise ValueError(f"since: {event_id[:60]!r} is not an event id")
