"""Calls that are written as JSON: objects with a name and arguments, or arguments after a name. Pure."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from outrider.gateway.tools.parsers.blocks import Block, Call, Enclosed, MarkedCalls, NotACall, checked, spaces
from outrider.gateway.tools.parsers.tool_calls import FORMATS, Format, Tools, held_back
from outrider.gateway.tools.parsers.values import JsonValue
from outrider.limits import MAX_FUNCTION_NAME_CHARS

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = frozenset((*_NAMES, "type", "id", "tool_call_id", *_ARGUMENTS))
"""Members that a call may have. The gateway writes `type` and `id` itself."""
_MAX_HEAD_CHARS = 2 * MAX_FUNCTION_NAME_CHARS + 256


class _Next(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class _CallObject:
    """One call."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self.done = False
        self._members: dict[str, str] = {}
        """Those that are complete, each as it is written."""
        self._next = _Next.OPEN
        self._value: JsonValue | None = None
        """A key or a member's value that has begun."""
        self._key = ""

    def read(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._value is None:
                at = spaces(text, at)
                at = self._structure(text, at) if at < len(text) else at
                continue
            at = self._value.read(text, at)
            if not self._value.done:
                break
            try:
                self._add("".join(self._value.text))
            except NotACall as error:
                raise error.beyond(at) from error
        return at

    def _structure(self, text: str, at: int) -> int:
        char, follows = text[at], self._next
        if char == "{" and follows is _Next.OPEN:
            self._next = _Next.KEY_OR_END
        elif char == "}" and follows in (_Next.KEY_OR_END, _Next.COMMA_OR_END):
            self.done = True
        elif char == "," and follows is _Next.COMMA_OR_END:
            self._next = _Next.KEY
        elif char == ":" and follows is _Next.COLON:
            self._next = _Next.VALUE
        elif follows is _Next.VALUE or (char == '"' and follows in (_Next.KEY, _Next.KEY_OR_END)):
            self._value = JsonValue()
            return at
        else:
            raise NotACall(f"{char!r} is at a wrong place", at)
        return at + 1

    def _add(self, written: str) -> None:
        self._value = None
        if self._next is not _Next.VALUE:
            self._key, self._next = str(json.loads(written)), _Next.COLON
            if self._key not in _MEMBERS:
                raise NotACall("it has other members")
            return
        self._members[self._key], self._next = written, _Next.COMMA_OR_END

    def _name(self) -> str:
        written = next((self._members[each] for each in _NAMES if each in self._members), "null")
        name = json.loads(written) if written.startswith('"') else None
        if name not in self._tools:
            raise NotACall("it names no declared tool")
        return str(name)

    def call(self) -> Call:
        """Of a complete object. Raises NotACall."""
        given = [self._members[each] for each in _ARGUMENTS if each in self._members]
        if len(given) > 1 or all(each in self._members for each in _NAMES):
            raise NotACall("it has other members")
        arguments = given[0] if given else "{}"
        if arguments.startswith('"'):
            # Some models write the arguments as in OpenAI's API: JSON within a string.
            arguments = json.loads(arguments)
        return checked(self._name(), arguments)

    def begun(self) -> list[Call]:
        """The call, if its arguments have begun."""
        if self._key in _ARGUMENTS and self._next is _Next.VALUE and self._value is not None:
            self._members[self._key] = "".join(self._value.text)
        arguments = next((self._members[each] for each in _ARGUMENTS if each in self._members), "")
        if not arguments.startswith("{") or not self._members.keys() & {*_NAMES}:
            return []
        return [Call(self._name(), arguments)]


class JsonCalls(Block):
    """Objects, in a list or not."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._objects: list[_CallObject] = []
        self._listed = self._wants = self._closed = False

    def read(self, text: str, at: int) -> int:
        while at < len(text):
            if self._objects and not self._objects[-1].done:
                at = self._objects[-1].read(text, at)
                if not self._objects[-1].done:
                    return at
            at = spaces(text, at)
            try:
                self.stopped = at < len(text) and not self._between(text[at])
            except NotACall as error:
                raise error.beyond(at) from error
            if self.stopped:
                return at
            at += at < len(text) and text[at] != "{"
        return at

    def _between(self, char: str) -> bool:
        """Whether the character, between objects, is part of the block."""
        first = not self._objects
        if char == "[" and first and not self._listed:
            self._listed = True
        elif char == "{" and not self._closed and (first or self._wants or not self._listed):
            self._objects.append(_CallObject(self._tools))
            self._wants = False
        elif first or self._wants:
            raise NotACall("it is no call")
        elif self._closed:
            return False
        elif char == "," or (char == ";" and not self._listed):
            self._wants = True
        elif char == "]" and self._listed:
            self._closed = True
        elif self._listed:
            raise NotACall("the list does not end")
        else:
            return False
        return True

    def calls(self) -> list[Call]:
        if not self._objects or self._wants or not self._objects[-1].done or self._listed != self._closed:
            raise NotACall("it is not complete")
        return [each.call() for each in self._objects]

    def begun(self, rest: str) -> list[Call]:
        try:
            whole = [each.call() for each in self._objects if each.done]
            return whole + [call for each in self._objects[-1:] if not each.done for call in each.begun()]
        except NotACall:
            return []


class NamedArguments(Block):
    """One call: a head, and arguments. A block that begins with none of the tools' names may be JsonCalls."""

    def __init__(self, tools: Tools, head: str, tail: str = "", before: str = "", *, or_json: bool = False) -> None:
        """`head`: a pattern of what precedes the arguments, of which `name` is the tool's name. `tail`: a text that may
        follow them. `before`: the head's part before the name."""
        self._tools, self._pattern, self._tail, self._before = tools, re.compile(head, re.DOTALL), tail, before
        self._head = ""
        self._name = ""
        self._json = JsonCalls(tools) if or_json else None
        self._arguments = JsonValue()

    def read(self, text: str, at: int) -> int:
        if not self._head:
            at = spaces(text, at)
            if self._json is not None and at < len(text) and text[at] in "[{":
                self._head = "["
        if self._head == "[" and self._json is not None:
            at = self._json.read(text, at)
            self.stopped = self._json.stopped
            return at
        if not self._name:
            at = self._in_head(text, at)
        if self._name and not self._arguments.done:
            at = self._arguments.read(text, at)
        return self._after(text, at) if self._arguments.done else at

    def _in_head(self, text: str, at: int) -> int:
        opens = text.find("{", at)
        end = opens if opens >= 0 else len(text)
        self._head += text[at:end]
        stripped = self._head.lstrip()
        if len(stripped) > _MAX_HEAD_CHARS or not self._may_name(stripped):
            raise NotACall("it names no declared tool", end)
        if opens >= 0:
            found = self._pattern.fullmatch(stripped)
            if found is None or found["name"] not in self._tools:
                raise NotACall("it names no declared tool", end)
            self._name = found["name"]
        return end

    def _may_name(self, head: str) -> bool:
        before, named = head[: len(self._before)], head[len(self._before) :]
        if not self._before.startswith(before):
            return False
        return any(tool.startswith(named) or named.startswith(tool) for tool in self._tools)

    def _after(self, text: str, at: int) -> int:
        at = spaces(text, at)
        if self._tail and at < len(text):
            if text.startswith(self._tail, at):
                at, self._tail = spaces(text, at + len(self._tail)), ""
            elif held_back(text[at:], (self._tail,)) == len(text) - at:
                return at
        self.stopped = at < len(text)
        return at

    def calls(self) -> list[Call]:
        if self._head == "[" and self._json is not None:
            return self._json.calls()
        if not self._arguments.done:
            raise NotACall("it is not complete")
        return [checked(self._name, "".join(self._arguments.text))]

    def begun(self, rest: str) -> list[Call]:
        if self._head == "[" and self._json is not None:
            return self._json.begun(rest)
        return [Call(self._name, "".join(self._arguments.text))] if self._name and self._arguments.text else []


HERMES_MARKS = ("<tool_call>", "</tool_call>")


def _json(
    begins: tuple[str, ...], ends: tuple[str, ...], hints: tuple[str, ...], at_start: str = "", *, bare: bool = False
) -> Format:
    def parser(tools: Tools) -> MarkedCalls:
        return MarkedCalls(lambda: JsonCalls(tools), begins, ends, at_start)

    return Format(parser, tuple(mark for mark in (*begins, *ends) if not mark.isalpha()), hints, bare)


FORMATS["hermes"] = _json(HERMES_MARKS[:1], HERMES_MARKS[1:], ("<tool_call>", "arguments"))
FORMATS["llama3_json"] = _json(
    ("<|python_tag|>",), (), ('{"name": function name, "parameters"',), at_start="{", bare=True
)
FORMATS["granite"] = _json(("<|tool_call|>", "<tool_call>"), (), ("<|tool_call|>",))
FORMATS["phi4_mini_json"] = _json(("<|tool_call|>", "functools"), ("<|/tool_call|>",), ("functools[",))
FORMATS["nemotron_json"] = _json(("<TOOLCALL>",), ("</TOOLCALL>",), ("<TOOLCALL>",))
# Of Hunyuan too.
FORMATS["jamba"] = _json(("<tool_calls>",), ("</tool_calls>",), ("<tool_calls>",))
FORMATS["cohere_command"] = _json(("<|START_ACTION|>",), ("<|END_ACTION|>",), ("<|START_ACTION|>",))

# Mistral: a list of objects after the mark; newer models write NAME[ARGS]{…} or NAME{…} instead.
_MISTRAL = r"(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?"
FORMATS["mistral"] = Format(
    lambda tools: MarkedCalls(lambda: NamedArguments(tools, _MISTRAL, or_json=True), ("[TOOL_CALLS]",)),
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ("[TOOL_CALLS]",),
    # Its templates accept only ids of so many.
    call_id_chars=9,
)


def _enclosed(
    outer: tuple[str, str],
    inner: tuple[str, str],
    between: str,
    hints: tuple[str, ...],
    head: str,
    tail: str = "",
    before: str = "",
) -> Format:
    def parser(tools: Tools) -> MarkedCalls:
        make = lambda: Enclosed(lambda: NamedArguments(tools, head, tail, before), *inner)  # noqa: E731
        return MarkedCalls(make, outer[:1], outer[1:])

    return Format(parser, (*outer, *inner, between), hints)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_OF_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEP = "<｜tool▁sep｜>"
FORMATS["deepseek_v3"] = _enclosed(
    *(_DEEPSEEK, _OF_DEEPSEEK, _SEP, (_DEEPSEEK[0], f"{_OF_DEEPSEEK[0]}function")),
    rf"function{_SEP}(?P<name>[^\n{{]+)\s*```json\s*",
    tail="```",
    before=f"function{_SEP}",
)
FORMATS["deepseek_v31"] = _enclosed(
    _DEEPSEEK, _OF_DEEPSEEK, _SEP, (_DEEPSEEK[0], "tool_call_name"), rf"(?P<name>[^{{]+){_SEP}\s*"
)
FORMATS["kimi_k2"] = _enclosed(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
    ("<|tool_calls_section_begin|>",),
    r"functions\.(?P<name>[^{]+):\d+\s*<\|tool_call_argument_begin\|>\s*",
    before="functions.",
)
