"""Calls whose arguments are texts between tags, `<parameter=city>Bern</parameter>`. Pure.

The texts become JSON by the tool's schema, as in vLLM: what may be a string is the text as it is written.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from outrider.gateway.fields import from_json
from outrider.gateway.tools.parsers.blocks import Block, Call, MarkedCalls, NotACall, checked, spaces
from outrider.gateway.tools.parsers.tool_calls import FORMATS, SPACE, Format, Tools, held_back

_MAX_NAME_CHARS = 1024
_MAX_LITERAL_CHARS = 65_536
_MAX_BLANKS = 64
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    call: str
    """Before a call's name; empty: the block begins with the name."""
    named: str
    """After the name; empty: white space or the next tag ends it."""
    key: str
    key_end: str
    value: str
    """Between name and text of an argument, if anything but white space."""
    value_end: str
    call_end: str
    """Empty: the block's end ends the call."""
    block_end: str
    untyped_json: bool = False
    """Whether a text without a schema may be JSON, and not only a string."""


class _Next(Enum):
    CALL = auto()
    NAME = auto()
    KEY_OR_END = auto()
    KEY = auto()
    OPEN_VALUE = auto()
    VALUE = auto()


class TaggedCalls(Block):
    def __init__(self, tools: Tools, tags: Tags) -> None:
        self._tools, self._tags = tools, tags
        self._done: list[tuple[str, list[str]]] = []
        """Names, and members of the arguments as JSON."""
        self._next = _Next.CALL if tags.call else _Next.NAME
        self._key = ""
        self._text: list[str] = []
        """Of what is read now."""

    def read(self, text: str, at: int) -> int:
        while at < len(text) and not self.stopped:
            try:
                after = self._part(text, at)
            except NotACall as error:
                raise error.beyond(at) from error
            if after is None:
                break
            at = after
        return at

    def _part(self, text: str, at: int) -> int | None:
        """Reads a part. Returns where it ends; None: it needs more."""
        tags = self._tags
        match self._next:
            case _Next.NAME:
                return self._in_name(text, at)
            case _Next.KEY:
                return self._until(tags.key_end, text, at)
            case _Next.VALUE:
                return self._in_value(text, at)
        at = spaces(text, at)
        if at == len(text):
            return at
        expected = {
            _Next.CALL: {tags.call: _Next.NAME},
            _Next.KEY_OR_END: {tags.key: _Next.KEY, tags.call_end: _Next.CALL},
            _Next.OPEN_VALUE: {tags.value: _Next.VALUE},
        }[self._next]
        return self._tag(expected, text, at)

    def _tag(self, expected: Mapping[str, _Next], text: str, at: int) -> int | None:
        for tag, follows in expected.items():
            if tag and text.startswith(tag, at):
                self._next = follows
                return at + len(tag)
        if any(tag.startswith(text[at:]) for tag in expected):
            return None
        between = _Next.CALL if self._tags.call_end else _Next.KEY_OR_END
        if self._next is not between or not self._done:
            raise NotACall("a tag is missing")
        self.stopped = True
        return at

    def _in_name(self, text: str, at: int) -> int | None:
        if self._tags.named:
            return self._until(self._tags.named, text, at)
        if not self._text:
            at = spaces(text, at)
        end = next((i for i in range(at, len(text)) if text[i] in SPACE or text[i] == "<"), len(text))
        self._add(text[at:end])
        if end < len(text):
            self._named()
        return end

    def _until(self, tag: str, text: str, at: int) -> int | None:
        """Reads a name up to the tag."""
        found = text.find(tag, at)
        end = found if found >= 0 else len(text) - held_back(text[at:], (tag,))
        if end == at and found < 0:
            return None
        self._add(text[at:end])
        if found < 0:
            return end
        if self._next is _Next.NAME:
            self._named()
        else:
            self._key, self._text = "".join(self._text).strip(SPACE), []
            self._next = _Next.OPEN_VALUE if self._tags.value else _Next.VALUE
        return end + len(tag)

    def _add(self, text: str) -> None:
        self._text.append(text)
        if sum(map(len, self._text)) > _MAX_NAME_CHARS or len(self._text) > _MAX_NAME_CHARS:
            raise NotACall("a name is too long")

    def _named(self) -> None:
        name = "".join(self._text).strip(SPACE)
        if name not in self._tools:
            raise NotACall("it names no declared tool")
        self._done.append((name, []))
        self._text, self._next = [], _Next.KEY_OR_END

    def _in_value(self, text: str, at: int) -> int | None:
        """A text ends where its end tag is followed by another argument, or by the end of the call: it may have such
        tags in it."""
        tags = self._tags
        found = text.find(tags.value_end, at)
        if found < 0:
            end = len(text) - held_back(text[at:], (tags.value_end,))
            self._text.append(text[at:end])
            return end if end > at else None
        after = found + len(tags.value_end)
        rest = text[
            spaces(text, after) : spaces(text, after) + len(tags.key) + len(tags.call_end) + len(tags.block_end)
        ]
        follows = (tags.key, tags.call_end or tags.block_end)
        if any(map(rest.startswith, follows)):
            self._text.append(text[at:found])
            self._end_value()
            return after
        if any(tag.startswith(rest) for tag in follows) and len(text) - after < _MAX_BLANKS:
            self._text.append(text[at:found])
            return found if found > at else None
        self._text.append(text[at:after])
        return after

    def _end_value(self) -> None:
        name, members = self._done[-1]
        members.append(f"{json.dumps(self._key, ensure_ascii=False)}: {self._typed(name, ''.join(self._text))}")
        self._text, self._next = [], _Next.KEY_OR_END

    def _typed(self, name: str, text: str) -> str:
        properties = self._tools[name].get("properties")
        schema = properties.get(self._key) if isinstance(properties, Mapping) else None
        untyped = schema is None and self._tags.untyped_json
        return typed(text.removeprefix("\n").removesuffix("\n"), {} if untyped else schema)

    def calls(self) -> list[Call]:
        complete = _Next.CALL if self._tags.call_end else _Next.KEY_OR_END
        if not self._tags.call and self._next is _Next.NAME and self._text:
            self._named()
        if not self._done or self._next is not complete:
            raise NotACall("it is not complete")
        return [checked(name, f"{{{', '.join(members)}}}") for name, members in self._done]

    def begun(self, rest: str) -> list[Call]:
        if self._next in (_Next.CALL, _Next.NAME) or not self._done:
            begun = self._done
            return [checked(name, f"{{{', '.join(members)}}}") for name, members in begun]
        *whole, (name, members) = self._done
        if self._next is _Next.VALUE:
            # As far as it came; what is no string yet is left out.
            written = self._typed(name, "".join(self._text).removesuffix("\n") + rest)
            if written.startswith('"'):
                members = [*members, f"{json.dumps(self._key, ensure_ascii=False)}: {written[:-1]}"]
        calls = [checked(each, f"{{{', '.join(given)}}}") for each, given in whole]
        return [*calls, Call(name, "{" + ", ".join(members))]


def typed(text: str, schema: Any) -> str:
    """The text as JSON of the schema's type. What cannot be is a string."""
    kinds = _kinds(schema)
    word = _WORDS.get(text.strip().lower(), "")
    if word == "null" and "null" in kinds:
        return word
    if "string" in kinds:
        return json.dumps(text, ensure_ascii=False)
    if word:
        return word
    stripped = text.strip()
    try:
        from_json(stripped, allow_inf_nan=False)
    except ValueError:
        return _of_python(stripped) or json.dumps(text, ensure_ascii=False)
    return stripped


def _of_python(text: str) -> str:
    """A literal of Python as JSON; empty if it is none."""
    if len(text) > _MAX_LITERAL_CHARS or text[:1] not in ("{", "[", "("):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ""


def _kinds(schema: Any) -> set[str]:
    """The types that a value may have; without any that are named, a string."""
    if schema == {}:
        return set()
    found = _named_kinds(schema, 0)
    return found or {"string"}


def _named_kinds(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    kinds = {str(each) for each in (kind if isinstance(kind, list) else [kind] if kind is not None else [])}
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            kinds |= _named_kinds(option, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not kinds and isinstance(values, list):
        kinds = {"string" if isinstance(each, str) else "null" if each is None else "other" for each in values}
    return kinds


def _tagged(begin: str, tags: Tags, marks: tuple[str, ...] = ()) -> Format:
    def parser(tools: Tools) -> MarkedCalls:
        return MarkedCalls(lambda: TaggedCalls(tools, tags), (begin,), (tags.block_end,))

    return Format(parser, (begin, tags.block_end, *marks), tuple(filter(None, (begin, tags.call, tags.key))))


# Qwen3-Coder and Qwen 3.5.
FORMATS["qwen3_coder"] = _tagged(
    "<tool_call>", Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>")
)
FORMATS["seed_oss"] = _tagged(
    "<seed:tool_call>",
    Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</seed:tool_call>"),
)
FORMATS["minimax_m2"] = _tagged(
    "<minimax:tool_call>",
    Tags('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", "</minimax:tool_call>"),
)
# GLM 4.5 and later.
FORMATS["glm45"] = _tagged(
    "<tool_call>",
    Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>", untyped_json=True),
    ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
