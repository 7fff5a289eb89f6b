"""Fields that this release does not know, in messages from outside the cluster.

Between our own processes they are ignored, so that two releases work together. A client that sends one asks for
something that it would not get.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import InvalidRequest


def check_known(message: Message, path: str = "") -> None:
    """Raises InvalidRequest that says in which field of the request, and under which number."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(path or "request", f"field number {number} is not known here", reason="UNKNOWN_FIELD")
    for field, value in message.ListFields():
        for name, inner in _messages(field, value):
            check_known(inner, f"{path}.{name}" if path else name)


def _messages(field: FieldDescriptor, value: Any) -> Iterable[tuple[str, Message]]:
    """Those in one field, by their names."""
    if field.message_type is None:
        return ()
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is None:
            return ()
        return [(f"{field.name}[{key}]", inner) for key, inner in value.items()]
    if field.is_repeated:
        return [(f"{field.name}[{index}]", inner) for index, inner in enumerate(value)]
    return [(field.name, value)]
