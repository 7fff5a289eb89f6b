"""Messages as no client of ours would send them: fields at their limits, lists without end, bytes of chance.

Deterministic: all is drawn from the generator given.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_MAX_REPEATED = 5000
_MAX_DEPTH = 4
_TEXTS = ("", "x", "\0", "r\u00e9\u20ac\U0001f600", "-" * 300, "y" * 5000, "127.0.0.1:1", "WORKER", "../..")
_F = FieldDescriptor
_SIGNED = (0, 1, -1, 2**31 - 1, -(2**31))
_EDGES: dict[int, Sequence[Any]] = {
    _F.CPPTYPE_INT32: _SIGNED,
    _F.CPPTYPE_ENUM: (*_SIGNED, 2, 3, 99),
    _F.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    _F.CPPTYPE_UINT32: (0, 1, 2, 63, 64, 65, 255, 256, 65536, 2**31, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 1, 2, 3, 2**63, 2**64 - 1),
    _F.CPPTYPE_FLOAT: (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.4e38, math.nan, math.inf, -math.inf),
    _F.CPPTYPE_DOUBLE: (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf),
    _F.CPPTYPE_BOOL: (False, True),
}


def mutated(seeds: Sequence[Message], rng: random.Random) -> Iterator[bytes]:
    """Without end: each is one of the messages given, changed in some way."""
    ways: tuple[tuple[Callable[[Message, random.Random], bytes], int], ...] = (
        (_with_odd_fields, 12),
        (_with_odd_bytes, 4),
        (_arbitrary, 3),
        (_noise, 1),
    )
    kinds, weights = zip(*ways, strict=True)
    while True:
        change = rng.choices(kinds, weights)[0]
        yield change(rng.choice(seeds), rng)


def directed(seeds: Sequence[Message]) -> Iterator[bytes]:
    """Each field of the messages given, also of those inside, at each of its edges, one at a time."""
    for seed in seeds:
        message = type(seed)()
        message.CopyFrom(seed)
        for _ in _each_edge(message):
            yield message.SerializeToString()


def _each_edge(message: Any) -> Iterator[None]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            continue
        if field.message_type is not None:
            for inside in list(value)[:1] if field.is_repeated else [value] if message.HasField(field.name) else []:
                if isinstance(inside, Message):
                    yield from _each_edge(inside)
            continue
        for edge in _edges(field):
            if field.is_repeated:
                value.append(edge)
                yield
                value.pop()
            else:
                before = value if field.has_presence is False or message.HasField(field.name) else None
                setattr(message, field.name, edge)
                yield
                message.ClearField(field.name)
                if before is not None:
                    setattr(message, field.name, before)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _value_of(field: FieldDescriptor) -> FieldDescriptor:
    """Of a map."""
    assert field.message_type is not None
    return field.message_type.fields_by_name["value"]


def _edges(field: FieldDescriptor) -> Sequence[Any]:
    if field.type == _F.TYPE_STRING:
        return _TEXTS
    if field.type == _F.TYPE_BYTES:
        return b"", b"x", b"\xc0\x7f" * 64, bytes(5000)
    return _EDGES[field.cpp_type]


def _with_odd_fields(seed: Message, rng: random.Random) -> bytes:
    message = type(seed)()
    message.CopyFrom(seed)
    for _ in range(rng.randint(1, 4)):
        _change_one(message, rng)
    return message.SerializeToString()


def _with_odd_bytes(seed: Message, rng: random.Random) -> bytes:
    data = bytearray(seed.SerializeToString())
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 16)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def _arbitrary(seed: Message, rng: random.Random) -> bytes:
    message = type(seed)()
    _fill(message, rng, 0)
    return message.SerializeToString()


def _noise(seed: Message, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 9, 100, 3000)))


def _fill(message: Any, rng: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            _set(message, field, rng, depth)


def _change_one(message: Any, rng: random.Random) -> None:
    """Some field of the message or of one inside it."""
    inside = [value for field, value in message.ListFields() if field.message_type is not None and not _is_map(field)]
    if inside and rng.random() < 0.75:
        value = rng.choice(inside)
        if isinstance(value, Message):
            _change_one(value, rng)
            return
        if len(value) and rng.random() < 0.8:
            _change_one(rng.choice(value), rng)
            return
    if fields := message.DESCRIPTOR.fields:
        _set(message, rng.choice(fields), rng, 0)


def _set(message: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    if _is_map(field):
        for _ in range(rng.choice((0, 1, 50))):
            getattr(message, field.name)[rng.choice(_TEXTS)] = _edge(_value_of(field), rng)
    elif field.is_repeated:
        _set_repeated(getattr(message, field.name), field, rng, depth)
    elif field.message_type is None:
        setattr(message, field.name, _edge(field, rng))
    elif rng.random() < 0.3:
        message.ClearField(field.name)
    elif depth < _MAX_DEPTH:
        getattr(message, field.name).SetInParent()
        _fill(getattr(message, field.name), rng, depth + 1)


def _set_repeated(values: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    match rng.randrange(4):
        case 0:
            del values[:]
        case 1 if len(values):
            del values[rng.randrange(len(values)) :]
        case 2 if len(values):
            times = rng.choice((1, 3, 100))
            values.extend(list(values)[: _MAX_REPEATED // times] * times)
            del values[_MAX_REPEATED:]
        case _:
            for _ in range(rng.choice((1, 1, 2, 5))):
                if field.message_type is None:
                    values.append(_edge(field, rng))
                elif depth < _MAX_DEPTH:
                    _fill(values.add(), rng, depth + 1)


def _edge(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == _F.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == _F.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 16, 64, 65, 5000)))
    return rng.choice(_EDGES[field.cpp_type])
