"""Objects that a client sent: reading them, and the names of their fields."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from functools import cache, partial

import pydantic_core

from outrider.errors import InvalidRequest

log = logging.getLogger(__name__)
_MAX_NAME_CHARS = 100
_MAX_FIELDS = 64
"""Most fields of one object: a body has room for hundreds of thousands of names."""
from_json = partial(pydantic_core.from_json, cache_strings="none")
"""Reads JSON. The library's cache would keep short texts of all tenants, long after their requests."""


def check_names(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises InvalidRequest for the first unknown name. `where` is the path of the object."""
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{where}.{name[:_MAX_NAME_CHARS]}", "unknown field")


def ignore_unknown(where: str, given: Collection[str], known: tuple[str, ...]) -> None:
    """Names within a message or tool that are unknown here say nothing about the answer: clients send them to every
    server. Raises InvalidRequest for one that is a known name misspelt.
    """
    for place in ignored_of(where, given, known):
        log.debug("ignored: %s", place)


def ignored_of(where: str, given: Collection[str], known: tuple[str, ...]) -> list[str]:
    """The places of the unknown names. Raises InvalidRequest like `ignore_unknown`."""
    if len(given) > _MAX_FIELDS:
        raise InvalidRequest(where or "body", f"{len(given)} fields; at most {_MAX_FIELDS} are allowed")
    places = []
    for name in given:
        if name in known:
            continue
        place = f"{where}.{name[:_MAX_NAME_CHARS]}".removeprefix(".")
        if meant := _meant(name, known):
            raise InvalidRequest(place, f"unknown field; {meant} may be meant")
        places.append(place)
    return places


def _meant(name: str, known: tuple[str, ...]) -> str:
    """The known name from which this one differs by one letter more, less, other or swapped; empty if there is none."""
    if len(name) > _MAX_NAME_CHARS:
        return ""
    table = _shortened_names(known)
    return next((table[each] for each in _shortened(name) if each in table), "")


@cache
def _shortened_names(known: tuple[str, ...]) -> dict[str, str]:
    """Short names are left out: other short names differ from them by one letter."""
    return {each: name for name in known if len(name) > 3 for each in _shortened(name)}


def _shortened(name: str) -> Iterator[str]:
    """The name, and each that lacks one of its letters. Without what differs between languages: toolCalls, tool-calls.

    Two names that differ by one letter, or by two letters swapped, have one of these in common.
    """
    plain = name.lower().replace("_", "").replace("-", "")
    yield plain
    for at in range(len(plain)):
        yield plain[:at] + plain[at + 1 :]
