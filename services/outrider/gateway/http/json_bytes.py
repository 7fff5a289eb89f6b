"""JSON as it is sent: with arrays that were written before, and as one line of an event."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic_core import to_json

Json = dict[str, Any]
# Clients that split a stream by what Unicode takes for line ends break at these. JSON escapes all others.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}


# No dataclass, which would be JSON by itself.
class Array:
    """A JSON array that is kept as it is sent."""

    def __init__(self) -> None:
        self.data = bytearray(b"[")

    def add(self, value: object) -> None:
        if len(self.data) > 1:
            self.data += b","
        self.data += to_json(value)


def pieces(data: Json) -> list[bytes | bytearray]:
    """The data as JSON, with its arrays as they are."""
    marker, arrays = uuid.uuid4().hex, list[Array]()

    def place(array: Array) -> str:
        arrays.append(array)
        return marker

    first, *others = to_json(data, inf_nan_mode="null", fallback=place).split(f'"{marker}"'.encode())
    found: list[bytes | bytearray] = [first]
    for array, after in zip(arrays, others, strict=True):
        found += [array.data, b"]" + after]
    return found


def one_line(data: Json) -> bytes:
    """The data as JSON that every client takes for one line."""
    line = b"".join(pieces(data))
    for end, escaped in _LINE_ENDS.items():
        line = line.replace(end, escaped)
    return line
