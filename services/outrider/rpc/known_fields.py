"""Refuses messages from outside the cluster that have fields unknown to this release.

Processes of the cluster ignore them, so that two releases work together. A client that sends one would not get what it
asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import InvalidRequest


def check_known(message: Message, path: str = "") -> None:
    """Raises InvalidRequest with the path in the request, and the unknown number."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(path or "request", f"field number {number} is not known here", reason="UNKNOWN_FIELD")
    for field, value in message.ListFields():
        for name, inner in _messages(field, value):
            check_known(inner, f"{path}.{name}" if path else name)


def _messages(field: FieldDescriptor, value: Any) -> Iterable[tuple[str, Message]]:
    """The messages in one field, with their names."""
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            return ()
        return [(f"{field.name}[{key}]", inner) for key, inner in value.items()]
    if field.is_repeated:
        return [(f"{field.name}[{index}]", inner) for index, inner in enumerate(value)]
    return [(field.name, value)]
