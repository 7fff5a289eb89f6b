"""Messages with faults put in: what a broken or hostile client would send. By the seed, the same each time."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

_INTEGERS = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30)
_FLOATS = (0.5, -0.0, 1e-320, 1e39, 1e308, float("nan"), float("inf"))
_VALUES: tuple[Any, ...] = (
    *_INTEGERS,
    *_FLOATS,
    *(None, True, False, "", "a", "\x00", "\ud800", "é" * 300, "a" * 70_000, "1", "true", "../../etc/passwd", "%s{0}"),
    *([], {}, [[]], [None], [1, "a"], [0] * 2_000, ["a"] * 2_000, {"": ""}, {"type": "text"}, {"a": {"b": {"c": 1}}}),
)
_PIECES = (
    b"\x00",
    b"\xff",
    b"\xff" * 10,
    b"\x80" * 5,
    b"[" * 300,
    b"{" * 300,
    b'"',
    b"\\u",
    b"1e999",
    b"-",
    b",",
    b":",
)


def mutated_bytes(random: Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples with one to four faults: bits, pieces and ends lost, doubled, moved or made up."""
    data = random.choice(samples)
    for _ in range(random.randint(1, 4)):
        data = random.choice(_FAULTS)(random, data, random.choice(samples))
    return data


def mutated_json(random: Random, samples: Sequence[dict[str, Any]]) -> bytes:
    """One of the samples with one to three values, names or entries changed; valid JSON, but for NaN and the like."""
    value = copy.deepcopy(random.choice(samples))
    for _ in range(random.randint(1, 3)):
        _change(random, value)
    return json.dumps(value).encode()


def _change(random: Random, value: Any) -> None:
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random.choice(keys) if keys else ("" if isinstance(value, dict) else 0)
        inner = value[key] if keys else None
        if not isinstance(inner, dict | list) or random.random() < 0.4:
            break
        value = inner
    if isinstance(value, list):
        value[:] = random.choice([[], [*value, random.choice(_VALUES)], value * 4])
    elif random.random() < 0.7:
        value[key] = copy.deepcopy(random.choice(_VALUES))
    elif random.random() < 0.5:
        value.pop(key, None)
    else:
        value[str(key) + random.choice(["", "s", "\x00", "é"])] = copy.deepcopy(random.choice(_VALUES))


def _flip(random: Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def _lose(random: Random, data: bytes, other: bytes) -> bytes:
    begin, end = _span(random, data)
    return data[:begin] + data[end:]


def _double(random: Random, data: bytes, other: bytes) -> bytes:
    begin, end = _span(random, data)
    return data[:end] + data[begin:]


def _cut(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randint(0, len(data))]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _insert(random: Random, data: bytes, other: bytes) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + (random.choice(_PIECES) if random.random() < 0.5 else random.randbytes(8)) + data[at:]


def _span(random: Random, data: bytes) -> tuple[int, int]:
    begin = random.randint(0, len(data))
    return begin, min(len(data), begin + random.randint(1, 16))


_FAULTS: tuple[Callable[[Random, bytes, bytes], bytes], ...] = (_flip, _lose, _double, _cut, _splice, _insert)
