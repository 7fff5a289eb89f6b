"""Follows one value of JSON or Python, piece by piece. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from enum import Enum, auto

from outrider.gateway.tools.parsers.blocks import NotACall, spaces

_MAX_DEPTH = 250
"""More than the reader of a whole value allows."""
_MAX_SCALAR_CHARS = 4096
_WAIT = -1
_SCALAR = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_LINE_END = re.compile(r"(\\.)|[\r\n]", re.DOTALL)
"""One that is not escaped."""
_WORDS = {"true": "true", "false": "false", "null": "null"}
_CLOSES = {"{": "}", "[": "]", "(": ")"}


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """A value as it is written."""

    _string = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
    _escape = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")

    def __init__(self) -> None:
        self.done = False
        self.text: list[str] = []
        """Of the value as JSON, in pieces."""
        self._stack: list[str] = []
        self._next = _Next.VALUE
        self._quote = ""
        """Of the string that has begun."""
        self._scalar: list[str] = []
        """Of the number or word that has begun."""

    def read(self, text: str, at: int) -> int:
        """Reads on. Returns where it stopped: at the end, after the value, or before a few characters that it needs
        again with those after them. Raises NotACall."""
        while at < len(text) and not self.done:
            try:
                after = self._in_string(text, at) if self._quote else self._token(text, at)
            except NotACall as error:
                raise error.beyond(at) from error
            if after == _WAIT:
                break
            self._pass(text[at:after])
            at = after
        return at

    def _pass(self, written: str) -> None:
        self.text.append(written)

    def _token(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        if found or self._scalar:
            return self._in_scalar(text, at, found[0] if found else "")
        after = spaces(text, at)
        return after if after > at else self._structure(text, at)

    def _in_scalar(self, text: str, at: int, more: str) -> int:
        if not self._scalar:
            self._expect_value()
        self._scalar.append(more)
        if at + len(more) < len(text):
            written, self._scalar = "".join(self._scalar), []
            self._end_scalar(written)
            self._completed()
        return at + len(more)

    def _end_scalar(self, written: str) -> None:
        if written not in _WORDS and not _NUMBER.fullmatch(written):
            raise NotACall("it is no JSON")

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._begin_string(char)
        elif char in "{[":
            self._open(char)
        elif self._stack and char == _CLOSES[self._stack[-1][0]]:
            self._close()
        elif char == ":" and self._next is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and self._next is _Next.COMMA_OR_END:
            self._comma()
        else:
            raise NotACall(f"{char!r} is at a wrong place")
        return at + 1

    def _expect_value(self) -> None:
        if self._next not in (_Next.VALUE, _Next.VALUE_OR_END):
            raise NotACall("a value is at a wrong place")

    def _begin_string(self, quote: str) -> None:
        if self._next not in (_Next.KEY, _Next.KEY_OR_END):
            self._expect_value()
        self._quote = quote

    def _open(self, char: str) -> None:
        self._expect_value()
        if len(self._stack) >= _MAX_DEPTH:
            raise NotACall("it is too deep")
        self._stack.append(char)
        self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END

    def _close(self) -> None:
        if self._next not in (_Next.COMMA_OR_END, _Next.KEY_OR_END, _Next.VALUE_OR_END):
            raise NotACall("it ends at a wrong place")
        self._stack.pop()
        self._completed()

    def _comma(self) -> None:
        self._next = _Next.KEY if self._stack[-1] == "{" else _Next.VALUE

    def _completed(self) -> None:
        self.done = not self._stack
        self._next = _Next.COMMA_OR_END

    def _in_string(self, text: str, at: int) -> int:
        after = self._rest(self._string.match(text, at))
        if after == len(text):
            return after
        if self._escape.match(text, after):
            return after if after > at else _WAIT
        if text[after] != self._quote:
            raise NotACall("a string has what no string has", after)
        self._end_string()
        return after + 1

    @staticmethod
    def _rest(found: re.Match[str] | None) -> int:
        assert found is not None
        return found.end()

    def _end_string(self) -> None:
        self._quote = ""
        if self._next in (_Next.KEY, _Next.KEY_OR_END):
            self._next = _Next.COLON
        else:
            self._completed()


class PythonValue(JsonValue):
    """A literal, which becomes JSON. JSON's words are taken too."""

    _strings = {  # Constant.
        quote: re.compile(rf"(?:[^{quote}\\]+|\\.)*", re.DOTALL) for quote in "\"'"
    } | {quote * 3: re.compile(rf"(?:[^{quote}\\]+|\\.|{quote}{{1,2}}(?=[^{quote}]))*", re.DOTALL) for quote in "\"'"}

    def __init__(self) -> None:
        super().__init__()
        self._raw: list[str] = []

    def _pass(self, written: str) -> None:
        """What it becomes is added where it is known."""

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if char in "\"'":
            if char * 3 != text[at : at + 3] and text[at:] in (char, char * 2):
                return _WAIT
            self._begin_string(char * 3 if text.startswith(char * 3, at) else char)
            return at + len(self._quote)
        if char == "(":
            self._open(char)
            at += 1
        else:
            at = super()._structure(text, at)
        self.text.append({"(": "[", ")": "]", ",": ", ", ":": ": "}.get(char, char))
        return at

    def _close(self) -> None:
        if self._stack[-1] == "(" and self._next is not _Next.VALUE_OR_END:
            raise NotACall("a value in brackets")
        super()._close()
        if self.text[-1] == ", ":
            self.text.pop()

    def _comma(self) -> None:
        """One may be the last."""
        self._stack[-1] = self._stack[-1][0] + ","
        self._next = _Next.KEY_OR_END if self._stack[-1][0] == "{" else _Next.VALUE_OR_END

    def _end_scalar(self, written: str) -> None:
        self.text.append(_WORDS.get(written) or _literal(written))

    def _in_string(self, text: str, at: int) -> int:
        after = self._rest(self._strings[self._quote].match(text, at))
        self._raw.append(text[at:after])
        if after == len(text):
            return after
        if not text.startswith(self._quote, after):
            # A backslash, or quotes of which there may be three.
            return after if after > at else _WAIT
        after += len(self._quote)
        raw, self._raw = "".join(self._raw), []
        if len(self._quote) == 1:
            # Templates write the lines of a text as they are.
            raw = _LINE_END.sub(lambda found: found[1] or {"\n": "\\n", "\r": "\\r"}[found[0]], raw)
        self.text.append(_literal(self._quote + raw + self._quote, len(raw) + _MAX_SCALAR_CHARS))
        self._end_string()
        return after


def _literal(written: str, most: int = _MAX_SCALAR_CHARS) -> str:
    """As JSON. Raises NotACall."""
    if len(written) > most:
        raise NotACall("it is too long")
    try:
        with warnings.catch_warnings():
            # Of the model's code, which is not run.
            warnings.simplefilter("ignore")
            return json.dumps(ast.literal_eval(written), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error
