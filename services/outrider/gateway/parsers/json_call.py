"""Parses a tool call, a JSON object with name and arguments, character by character as it is generated."""

from __future__ import annotations

import json
from enum import Enum, auto

from outrider.protocol.limits import MAX_FUNCTION_NAME_CHARS

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class NotACall(ValueError):
    """The text is not a tool call."""


class JsonValue:
    """Finds the end of one JSON value, without checking more of its content than that needs."""

    def __init__(self) -> None:
        self.first = ""
        """Its first character."""
        self.ended = False
        self._chars: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._chars)

    @property
    def num_chars(self) -> int:
        return len(self._chars)

    def push(self, char: str) -> bool:
        """Whether `char` is a part of the value. A number or a word ends before the first other character."""
        if not self.first and char not in '{["-0123456789tfn':
            raise NotACall(f"{char!r} begins no value")
        if self.first and self.first not in '{["' and char in _SPACE + ",}]":
            self.ended = True
            return False
        self.first = self.first or char
        self._chars.append(char)
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.ended = not (self._in_string or self._depth) and char in '}]"'
        return True


class _Expects(Enum):
    OPENING = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class JsonCall:
    """One call. Once its name is known, `push` returns the text of its arguments, verbatim."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self.name: str | None = None
        self.ended = False
        self._expects = _Expects.OPENING
        self._key = ""
        self._value: JsonValue | None = None
        self._has_arguments = False
        self._unsent: list[str] = []
        """Text of the arguments."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self._chars)

    def push(self, char: str) -> str:
        """Raises NotACall once the text cannot be a call."""
        self._chars.append(char)
        if self._value is not None:
            taken = self._value.push(char)
            self._see(char if taken else "")
            if taken:
                return self._more()
        if char not in _SPACE:
            self._structure(char)
        return self._more()

    def _see(self, char: str) -> None:
        """Handles one character of the current value."""
        value = self._value
        assert value is not None
        if self._expects is _Expects.VALUE and self._key in _ARGUMENTS and value.first != '"':
            self._argue(char)
        if not value.ended:
            if self._key == "name" and value.num_chars > MAX_FUNCTION_NAME_CHARS:
                raise NotACall("its name is too long")
            return
        self._value = None
        if self._expects is _Expects.KEY:
            self._key, self._expects = _string(value.text), _Expects.COLON
            return
        self._expects = _Expects.COMMA
        if self._key == "name":
            self.name = _string(value.text)
        elif self._key in _ARGUMENTS and value.first == '"':
            # Some models write the arguments as in OpenAI's API: JSON within a string.
            self._argue(_string(value.text))

    def _structure(self, char: str) -> None:
        match self._expects, char:
            case _Expects.OPENING, "{":
                self._expects = _Expects.KEY
            case _Expects.KEY, '"':
                self._begin(char)
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _:
                self._begin(char)
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.COMMA | _Expects.KEY), "}"):
                self._end()
            case _:
                raise NotACall(f"{char!r} in the place of a {self._expects.name.lower()}")

    def _begin(self, char: str) -> None:
        self._value = JsonValue()
        self._value.push(char)
        self._see(char)

    def _end(self) -> None:
        if self.name is None:
            raise NotACall("it has no name")
        if not self._has_arguments:
            self._argue("{}")
        self.ended = True

    def _argue(self, text: str) -> None:
        self._has_arguments = True
        self._unsent.append(text)

    def _more(self) -> str:
        if self.name is None or not self._unsent:
            return ""
        more, self._unsent = "".join(self._unsent), []
        return more


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise NotACall(str(error)) from error
    if not isinstance(value, str):
        raise NotACall(f"{text[:20]!r} is no string")
    return value
