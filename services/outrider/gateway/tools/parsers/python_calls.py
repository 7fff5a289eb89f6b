"""Calls that are written as Python's, with literal arguments by name: `f(a=1)`. Pure."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from outrider.gateway.tools.parsers.blocks import Block, Call, MarkedCalls, NotACall, checked, spaces
from outrider.gateway.tools.parsers.tool_calls import FORMATS, Format, Tools
from outrider.gateway.tools.parsers.values import PythonValue

_NAME = re.compile(r"[\w.-]*")
_MAX_NAME_CHARS = 1024


class _Next(Enum):
    LIST = auto()
    CALL = auto()
    KEY_OR_END = auto()
    VALUE = auto()
    COMMA_OR_END = auto()
    AFTER = auto()


class PythonCalls(Block):
    """In a list, or each in a line."""

    def __init__(self, tools: Tools, *, listed: bool) -> None:
        self._tools, self._listed = tools, listed
        self._done: list[tuple[str, list[str]]] = []
        """Names and arguments, as JSON in pieces."""
        self._next = _Next.LIST if listed else _Next.CALL
        self._name = ""
        """Of a function or an argument, as far as it has been read."""
        self._name_ended = False
        """By white space."""
        self._value = PythonValue()
        self._closed = False

    def read(self, text: str, at: int) -> int:
        while at < len(text) and not self.stopped:
            if self._next is _Next.VALUE:
                at = self._value.read(text, at)
                if not self._value.done:
                    return at
                self._done[-1][1].extend(self._value.text)
                self._next = _Next.COMMA_OR_END
            elif self._next in (_Next.CALL, _Next.KEY_OR_END) and (named := self._named(text, at)) > at:
                at = named
            else:
                at = self._structure(text, at)
        return at

    def _named(self, text: str, at: int) -> int:
        begins = spaces(text, at)
        self._name_ended = bool(self._name) and (self._name_ended or begins > at)
        at = begins
        if self._name_ended:
            return at
        found = _NAME.match(text, at)
        self._name += found[0] if found else ""
        if len(self._name) > _MAX_NAME_CHARS:
            raise NotACall("a name is too long", at)
        return found.end() if found else at

    def _structure(self, text: str, at: int) -> int:
        at = spaces(text, at)
        if at == len(text):
            return at
        match self._next, text[at]:
            case _Next.LIST, "[":
                self._next = _Next.CALL
            case _Next.CALL, "(" if self._name in self._tools:
                self._done.append((self._name, ["{"]))
                self._name, self._next = "", _Next.KEY_OR_END
            case _Next.KEY_OR_END, "=" if self._name.isidentifier():
                self._done[-1][1].append(f"{', ' if len(self._done[-1][1]) > 1 else ''}{json.dumps(self._name)}: ")
                self._name, self._next, self._value = "", _Next.VALUE, PythonValue()
            case ((_Next.KEY_OR_END | _Next.COMMA_OR_END), ")") if not self._name:
                self._done[-1][1].append("}")
                self._next = _Next.AFTER if self._listed else _Next.CALL
            case _Next.COMMA_OR_END, ",":
                self._next = _Next.KEY_OR_END
            case _Next.AFTER, "," if not self._closed:
                self._next = _Next.CALL
            case _Next.AFTER, "]" if not self._closed:
                self._closed = True
            case _Next.CALL, ("," | ";") if self._done and not self._listed and not self._name:
                pass
            case ((_Next.AFTER | _Next.CALL), _) if self._closed or (
                self._done and not self._listed and not self._name
            ):
                self.stopped = True
                return at
            case _:
                raise NotACall("it calls no declared tool by named arguments", at)
        return at + 1

    def calls(self) -> list[Call]:
        if not self._done or self._listed != self._closed or self._name or self._done[-1][1][-1] != "}":
            raise NotACall("it is not complete")
        return [checked(name, "".join(arguments)) for name, arguments in self._done]

    def begun(self, rest: str) -> list[Call]:
        begun = self._next in (_Next.KEY_OR_END, _Next.VALUE, _Next.COMMA_OR_END)
        if begun and self._next is _Next.VALUE:
            self._done[-1][1].extend(self._value.text)
        try:
            whole = [checked(name, "".join(written)) for name, written in self._done[: -1 if begun else None]]
        except NotACall:
            return []
        return whole + [Call(name, "".join(written)) for name, written in (self._done[-1:] if begun else ())]


def _python(begin: str, end: str, hint: str, at_start: str = "", *, listed: bool, bare: bool = False) -> Format:
    def parser(tools: Tools) -> MarkedCalls:
        return MarkedCalls(lambda: PythonCalls(tools, listed=listed), (begin,), (end,), at_start)

    return Format(parser, (begin, end), (hint,), bare)


# Llama 3.2 and 4.
FORMATS["pythonic"] = _python("<|python_start|>", "<|python_end|>", "func_name1(", "[", listed=True, bare=True)
FORMATS["lfm2"] = _python("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", listed=True)
FORMATS["olmo3"] = _python("<function_calls>", "</function_calls>", "<function_calls>", listed=False)
