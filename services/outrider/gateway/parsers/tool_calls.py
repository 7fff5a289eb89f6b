"""Splits a growing text into content and tool calls, in the formats of the models' chat templates.

Text that looks like a call but is none stays content. The names of the formats are vLLM's.
"""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from outrider.gateway.parsers.json_call import JsonCall, JsonValue, NotACall
from outrider.protocol.limits import MAX_FUNCTION_NAME_CHARS

_SPACE = " \t\r\n"
_MAX_LEAD_CHARS = MAX_FUNCTION_NAME_CHARS + len("[ARGS]")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of one call."""

    index: int
    name: str = ""
    """With the first delta of a call."""
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """The parts of a message that a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def call(self, index: int, name: str, arguments: str) -> None:
        self.calls.append(CallDelta(index, name, arguments))

    def merge(self) -> None:
        """Joins deltas of the same call."""
        of_calls = [list(deltas) for _, deltas in groupby(self.calls, key=lambda each: each.index)]
        self.calls = [CallDelta(each[0].index, each[0].name, "".join(d.arguments for d in each)) for each in of_calls]


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


class ToolParser(ABC):
    """Parses one answer."""

    def __init__(self) -> None:
        self.num_calls = 0

    @abstractmethod
    def push(self, text: str) -> Delta:
        """Adds text. Returns what is certain now."""

    @abstractmethod
    def finish(self) -> Delta:
        """Ends the answer. Returns what was held back."""


class NoTools(ToolParser):
    """The whole answer is content."""

    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self) -> Delta:
        return Delta()


class NamedCall(ToolParser):
    """The client has named the tool, so the whole answer is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> Delta:
        if not text:
            return Delta()
        first, self.num_calls = not self.num_calls, 1
        return Delta(calls=[CallDelta(0, self._name if first else "", text)])

    def finish(self) -> Delta:
        return Delta() if self.num_calls else Delta(calls=[CallDelta(0, self._name)])


class JsonCalls(ToolParser):
    """One or several JSON objects, alone or in a list, after a marker. Content may follow an end marker.

    `at_start`: an answer that begins with one of these characters is a call without a marker.
    """

    def __init__(self, begins: Sequence[str] = (), end: str = "", at_start: str = "") -> None:
        super().__init__()
        self._begins = begins
        self._end = end
        self._at_start = at_start
        self._longest = max(map(len, begins), default=1)
        self._kept: list[str] = []
        """Content held back: it may begin a marker, or be the white space before one."""
        self._recent = ""
        """Its last characters, as many as a marker has."""
        self._begun = False
        """Whether any content has arrived."""
        self._in_calls = False
        self._call: JsonCall | None = None
        self._announced = False
        self._tail = ""
        """Within calls: the beginning of an end marker, or other text."""

    def push(self, text: str) -> Delta:
        delta = Delta()
        for char in text:
            self._in_call(char, delta) if self._in_calls else self._in_content(char, delta)
        self._release(delta)
        delta.merge()
        return delta

    def finish(self) -> Delta:
        delta = Delta()
        if self._call is not None and not self._announced:
            self._kept.append(self._call.text)
        content = self._taken() + self._tail
        if not self.num_calls or content.strip():
            delta.content = content
        return delta

    def _taken(self) -> str:
        content = "".join(self._kept)
        self._keep("")
        return content

    def _keep(self, content: str) -> None:
        self._kept, self._recent = [content], content[-self._longest :]

    def _in_content(self, char: str, delta: Delta) -> None:
        self._kept.append(char)
        self._recent = (self._recent + char)[-self._longest :]
        if not self._begun and char in self._at_start:
            self._keep("")
            self._in_calls = True
            self._in_call(char, delta)
            return
        for marker in self._begins:
            if self._recent.endswith(marker):
                # Templates put line ends between text and calls.
                delta.content += self._taken()[: -len(marker)].rstrip()
                self._in_calls = True
                return
        self._begun |= char not in _SPACE

    def _release(self, delta: Delta) -> None:
        """Passes on all content except a possible beginning of a marker and the white space before it."""
        if self._in_calls:
            return
        content = self._taken()
        kept = content[: len(content) - held_back(content, self._begins)]
        certain = kept.rstrip() if self._begins or not self._begun else kept
        delta.content += certain
        self._keep(content[len(certain) :])

    def _in_call(self, char: str, delta: Delta) -> None:
        if self._call is None:
            self._between(char, delta)
            return
        try:
            arguments = self._call.push(char)
        except NotACall:
            self._give_up(self._call, delta)
            return
        self._tell(self._call, arguments, delta)
        if self._call.ended:
            self._call, self._announced = None, False

    def _between(self, char: str, delta: Delta) -> None:
        if not self._tail and (char in _SPACE or char in "[],;"):
            return
        if not self._tail and char == "{":
            self._call = JsonCall()
            self._call.push(char)
            return
        self._tail += char
        if self._tail == self._end:
            self._tail, self._in_calls = "", False
        elif not any(marker.startswith(self._tail) for marker in (self._end, *self._begins) if marker):
            self._keep(self._tail)
            self._tail, self._in_calls, self._begun = "", False, True
        elif self._tail in self._begins:
            self._tail = ""

    def _tell(self, call: JsonCall, arguments: str, delta: Delta) -> None:
        if call.name is not None and not self._announced:
            self._announced = True
            delta.call(self.num_calls, call.name, arguments)
            self.num_calls += 1
        elif arguments:
            delta.call(self.num_calls - 1, "", arguments)

    def _give_up(self, call: JsonCall, delta: Delta) -> None:
        """The text was no call. If it was announced, which cannot be undone, its rest is dropped."""
        text = "" if self._announced else call.text
        self._call, self._announced, self._in_calls, self._begun = None, False, False, True
        self._keep(text)


class MistralCalls(JsonCalls):
    """A list of JSON objects after the marker; newer models write NAME[ARGS]{…} or NAME{…} instead."""

    def __init__(self) -> None:
        super().__init__(("[TOOL_CALLS]",))
        self._name = ""
        self._value: JsonValue | None = None

    def _in_call(self, char: str, delta: Delta) -> None:
        if self._value is not None:
            self._value.push(char)
            delta.call(self.num_calls - 1, "", char)
            if self._value.ended:
                self._value = None
        elif self._name and char == "{":
            self._value = JsonValue()
            self._value.push(char)
            name, self._name = self._name.removesuffix("[ARGS]").strip(), ""
            delta.call(self.num_calls, name, char)
            self.num_calls += 1
        elif self._call is None and (self._name or not (char in _SPACE or char in "[],;{")):
            self._name += char
            if self._name == "TOOL_CALLS]":
                # The marker before each further call; its bracket was mistaken for that of a list.
                self._name = ""
            elif len(self._name) > _MAX_LEAD_CHARS:
                self._keep(self._name)
                self._name, self._in_calls, self._begun = "", False, True
        else:
            super()._in_call(char, delta)

    def finish(self) -> Delta:
        delta = super().finish()
        delta.content += self._name
        return delta


class PythonicCalls(ToolParser):
    """A Python list of calls with literal arguments, `[f(a=1), g(b="x")]`, as the whole answer. Read at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[str] = []
        self._first = ""
        """The answer's first character that is not white space."""

    def push(self, text: str) -> Delta:
        self._first = self._first or text.lstrip()[:1]
        self._kept.append(text)
        return Delta() if self._first in ("", "[") else Delta(self._taken())

    def finish(self) -> Delta:
        text = self._taken()
        try:
            calls = _python_calls(text)
        except NotACall:
            return Delta(text)
        self.num_calls = len(calls)
        return Delta(calls=[CallDelta(index, name, arguments) for index, (name, arguments) in enumerate(calls)])

    def _taken(self) -> str:
        text = "".join(self._kept)
        self._kept.clear()
        return text


def _python_calls(text: str) -> list[tuple[str, str]]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        assert isinstance(tree, ast.List) and tree.elts
        return [_python_call(each) for each in tree.elts]
    # Deep nesting and huge numbers raise some of these.
    except (AssertionError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error


def _python_call(node: ast.expr) -> tuple[str, str]:
    assert isinstance(node, ast.Call) and not node.args
    arguments = {}
    for keyword in node.keywords:
        assert keyword.arg is not None
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)


HERMES_MARKS = ("<tool_call>", "</tool_call>")
FORMATS = {
    "hermes": lambda: JsonCalls(HERMES_MARKS[:1], HERMES_MARKS[1]),
    "llama3_json": lambda: JsonCalls(("<|python_tag|>",), at_start="{"),
    "mistral": MistralCalls,
    "pythonic": PythonicCalls,
}
MARKERS = (*HERMES_MARKS, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
"""Tokens that are part of the text here, even if a vocabulary has them as special tokens."""


def format_of(chat_template: str) -> str:
    """The model's format of calls, found from its chat template; Hermes's if the template does not show it."""
    if "<tool_call>" in chat_template:
        return "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "func_name1(" in chat_template:
        return "pythonic"
    if "<|python_tag|>" in chat_template or "ipython" in chat_template:
        return "llama3_json"
    return "hermes"
