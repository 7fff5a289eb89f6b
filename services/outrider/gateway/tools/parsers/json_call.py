"""Reads tool calls that are written as JSON: objects with a name and arguments. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic_core import from_json

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = frozenset(("name", "type", "id", *_ARGUMENTS))
"""Members that a call may have. The gateway writes `type` and `id` itself."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object as the model has written it; its beginning, in an answer that was cut off."""


class NotACall(ValueError):
    """The text is no call, whatever may follow it."""


class Unfinished(Exception):
    """The text may be the beginning of calls."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        """Those that are complete, and one whose arguments have begun."""


def read_calls(text: str, tools: Collection[str]) -> list[Call]:
    """One or several calls to declared tools, in a list or not, and nothing else. Raises NotACall or Unfinished."""
    reader, calls = _Reader(text), list[Call]()
    listed = reader.take("[")
    more = True
    while more:
        calls.append(_call(reader, tools, calls))
        more = reader.take(",") or (not listed and (reader.take(";") or reader.next == "{"))
    if listed and not reader.take("]") and not reader.next:
        raise Unfinished(calls)
    return _nothing_after(reader, calls)


def read_arguments(text: str, name: str) -> Call:
    """A call by its arguments alone. Raises NotACall or Unfinished."""
    reader = _Reader(text)
    try:
        _, arguments = reader.value()
    except (ValueError, RecursionError):
        _check_beginning(text)
        raise Unfinished([Call(name, text.lstrip(SPACE))] if text.strip(SPACE) else []) from None
    if not is_object(arguments):
        raise NotACall("its arguments are no object")
    [call] = _nothing_after(reader, [Call(name, arguments)])
    return call


def is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def _call(reader: _Reader, tools: Collection[str], before: list[Call]) -> Call:
    start = reader.at
    try:
        members = reader.members()
    except (ValueError, RecursionError):
        _check_beginning(reader.text[start:], tools)
        begun = _begun(reader, tools)
        raise Unfinished(before if begun is None else [*before, begun]) from None
    name = _name(members, tools)
    if not members.keys() <= _MEMBERS or members.keys() >= {*_ARGUMENTS}:
        raise NotACall("it has other members")
    arguments = next((members[each] for each in _ARGUMENTS if each in members), "{}")
    if arguments.startswith('"'):
        # Some models write the arguments as in OpenAI's API: JSON within a string.
        arguments = json.loads(arguments)
    if not is_object(arguments):
        raise NotACall("its arguments are no object")
    return Call(name, arguments)


def _name(members: dict[str, str], tools: Collection[str]) -> str:
    written = members.get("name", "null")
    name = json.loads(written) if written.startswith('"') else None
    if name not in tools:
        raise NotACall("it names no declared tool")
    return str(name)


def _begun(reader: _Reader, tools: Collection[str]) -> Call | None:
    """The call whose arguments have begun before the text ends."""
    arguments = next((reader.found[each] for each in _ARGUMENTS if each in reader.found), "")
    if not arguments and reader.key in _ARGUMENTS:
        arguments = reader.text[reader.value_at :]
    if not arguments.startswith("{") or "name" not in reader.found:
        return None
    return Call(_name(reader.found, tools), arguments)


def _check_beginning(text: str, tools: Collection[str] | None = None) -> None:
    """Raises NotACall unless `text` may be the beginning of a JSON object, and of a call if there are `tools`."""
    if not text.strip(SPACE):
        return
    try:
        begun = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise NotACall(str(error)) from error
    if not isinstance(begun, dict):
        raise NotACall("it is no object")
    if tools is None:
        return
    name = begun.get("name", "")
    if not isinstance(name, str) or not any(tool.startswith(name) for tool in tools):
        raise NotACall("it names no declared tool")
    if not begun.keys() <= _MEMBERS:
        raise NotACall("it has other members")


def _nothing_after(reader: _Reader, calls: list[Call]) -> list[Call]:
    if reader.next:
        raise NotACall("other text follows")
    return calls


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


class _Reader:
    """Reads JSON from a text step by step. Raises ValueError where it is none or ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.found: dict[str, str] = {}
        """The members of the current object that are complete, each as it is written."""
        self.key = ""
        self.value_at = 0
        """Where the value of the current member begins."""

    @property
    def next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while self.at < len(self.text) and self.text[self.at] in SPACE:
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, char: str) -> bool:
        """Whether `char` is next, after white space. It is then read."""
        taken = self.next == char
        self.at += taken
        return taken

    def value(self) -> tuple[Any, str]:
        """The next value, and how it is written. Its numbers are not converted."""
        start = self._skipped()
        value, self.at = _DECODER.raw_decode(self.text, start)
        return value, self.text[start : self.at]

    def members(self) -> dict[str, str]:
        """The next object."""
        self.found, self.key, self.value_at = {}, "", self.at
        self._expect("{")
        if self.take("}"):
            return self.found
        while True:
            key, _ = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is no string")
            self._expect(":")
            self.key, self.value_at = key, self._skipped()
            _, self.found[key] = self.value()
            if self.take("}"):
                return self.found
            self._expect(",")

    def _expect(self, char: str) -> None:
        if not self.take(char):
            raise ValueError(f"{char!r} is missing at {self.at}")

    def _skipped(self) -> int:
        """Where the next part begins, after white space."""
        return self.at if self.next else len(self.text)
