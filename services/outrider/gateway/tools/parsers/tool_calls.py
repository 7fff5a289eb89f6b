"""Splits a growing text into content and tool calls, in the formats of the models' chat templates.

What may be a call is held back. It is passed on as a call once it is complete, and calls declared tools with JSON
objects as arguments; or if the answer's length cut it off within its arguments. Else all its text is content. The names
of the formats are vLLM's.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from outrider.gateway.tools.parsers.json_call import (
    SPACE,
    Call,
    NotACall,
    Unfinished,
    is_object,
    read_arguments,
    read_calls,
)
from outrider.protocol.limits import MAX_FUNCTION_NAME_CHARS

_FIRST_CHECK_CHARS = 16


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

    def add(self, other: Delta) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls

    @classmethod
    def join(cls, deltas: Iterable[Delta]) -> Delta:
        """The whole message, with one delta for each call."""
        whole = cls()
        for each in deltas:
            whole.add(each)
        whole.merge()
        return whole

    def merge(self) -> None:
        of_calls = [list(deltas) for _, deltas in groupby(self.calls, key=lambda each: each.index)]
        self.calls = [CallDelta(each[0].index, each[0].name, "".join(d.arguments for d in each)) for each in of_calls]


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    last = text[-longest:] if longest > 0 else ""
    # Nearly all text has no such character, and this is asked for every token.
    if not any(marker[0] in last for marker in markers if marker):
        return 0
    for count in range(len(last), 0, -1):
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
    def finish(self, *, cut: bool) -> Delta:
        """Ends the answer. Returns what was held back. `cut`: its length ended it."""

    def _pass_on(self, calls: Sequence[Call], delta: Delta) -> None:
        for call in calls:
            delta.calls.append(CallDelta(self.num_calls, call.name, call.arguments))
            self.num_calls += 1


class NoTools(ToolParser):
    """The whole answer is content."""

    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self, *, cut: bool) -> Delta:
        return Delta()


class NamedCall(ToolParser):
    """The client has named the tool, and a grammar makes the whole answer its arguments. They pass as they come."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> Delta:
        if not text:
            return Delta()
        first, self.num_calls = not self.num_calls, 1
        return Delta(calls=[CallDelta(0, self._name if first else "", text)])

    def finish(self, *, cut: bool) -> Delta:
        return Delta() if self.num_calls else Delta(calls=[CallDelta(0, self._name)])


class MarkedCalls(ToolParser):
    """Calls in blocks, each from a marker to an end marker, the next marker, or the end of the answer.

    `at_start`: an answer that begins with this character is a block without a marker.
    """

    def __init__(self, tools: Collection[str], begin: str = "", end: str = "", at_start: str = "") -> None:
        super().__init__()
        self._tools = tools
        self._begin = begin
        self._end = end
        self._at_start = at_start
        self._text = ""
        """Held back: the block, or content that may begin one."""
        self._lead: str | None = None
        """What precedes the block: white space and the marker. None outside a block."""
        self._searched = 0
        """So much of the block has no marker after it, or one within a string."""
        self._check_at = _FIRST_CHECK_CHARS
        """The length at which the block is checked next. Doubled each time, so that the checks take linear time."""
        self._called_last = False
        """Nothing but white space has followed the last call."""

    def push(self, text: str) -> Delta:
        delta = Delta()
        self._text += text
        while self._advances(delta):
            pass
        return delta

    def finish(self, *, cut: bool) -> Delta:
        delta = Delta()
        while self._lead is not None:
            self._end_block(delta, cut=cut)
            while self._advances(delta):
                pass
        # Templates put line ends after calls.
        if not self._called_last or self._text.strip(SPACE):
            delta.content += self._text
        self._text = ""
        return delta

    def _read(self, block: str) -> list[Call]:
        """The calls of a block. Raises NotACall or Unfinished."""
        return read_calls(block, self._tools)

    def _advances(self, delta: Delta) -> bool:
        return self._finds_block(delta) if self._lead is None else self._reads_block(delta)

    def _finds_block(self, delta: Delta) -> bool:
        if self._at_start:
            stripped = self._text.lstrip(SPACE)
            if not stripped:
                return False
            if stripped[0] == self._at_start:
                self._begin_block(self._text[: -len(stripped)], stripped)
                return True
            self._at_start = ""
        found = self._text.find(self._begin) if self._begin else -1
        end = found if found >= 0 else len(self._text) - held_back(self._text, (self._begin,))
        # Templates put line ends between text and calls.
        content = self._text[:end].rstrip(SPACE) if self._begin else self._text
        delta.content += content
        if content:
            self._at_start, self._called_last = "", False
        if found < 0:
            self._text = self._text[len(content) :]
            return False
        after = found + len(self._begin)
        self._begin_block(self._text[len(content) : after], self._text[after:])
        return True

    def _begin_block(self, lead: str, block: str) -> None:
        self._lead, self._text = lead, block
        self._searched, self._check_at = 0, _FIRST_CHECK_CHARS

    def _reads_block(self, delta: Delta) -> bool:
        markers = [marker for marker in (self._end, self._begin) if marker]
        found = [at for marker in markers if (at := self._text.find(marker, self._searched)) >= 0]
        if found:
            return self._ends_at(min(found), delta)
        self._searched = max(self._searched, len(self._text) - max(map(len, markers), default=0))
        if len(self._text) >= self._check_at:
            self._check_at = 2 * len(self._text)
            return not self._may_be_block(delta)
        return False

    def _ends_at(self, at: int, delta: Delta) -> bool:
        """Reads the block up to a marker. One within a string ends nothing."""
        try:
            calls = self._read(self._text[:at])
        except Unfinished:
            self._searched = at + 1
        except NotACall:
            self._give_up(delta)
        else:
            self._pass_on(calls, delta)
            self._lead, self._text, self._called_last = None, self._text[at:].removeprefix(self._end), True
        return True

    def _may_be_block(self, delta: Delta) -> bool:
        """Whether it may; else its text becomes content."""
        try:
            self._read(self._unmarked())
        except Unfinished:
            return True
        except NotACall:
            self._give_up(delta)
            return False
        return True

    def _unmarked(self) -> str:
        """The block without the beginning of a marker at its end."""
        return self._text[: len(self._text) - held_back(self._text, (self._end, self._begin))]

    def _end_block(self, delta: Delta, *, cut: bool) -> None:
        """At the end of the answer."""
        # What looks like the beginning of a marker may be text of the arguments, which the end cut off.
        calls = self._last_calls(self._text, cut=cut) or self._last_calls(self._unmarked(), cut=cut)
        if not calls:
            self._give_up(delta)
            return
        self._pass_on(calls, delta)
        self._lead, self._text, self._called_last = None, "", True

    def _last_calls(self, block: str, *, cut: bool) -> list[Call]:
        try:
            return self._read(block)
        except Unfinished as unfinished:
            return unfinished.calls if cut else []
        except NotACall:
            return []

    def _give_up(self, delta: Delta) -> None:
        """The block is no call: its marker becomes content, and what follows is read anew."""
        delta.content += self._lead or ""
        self._called_last = False
        self._lead, self._at_start = None, ""


class MistralCalls(MarkedCalls):
    """A list of JSON objects after the marker; newer models write NAME[ARGS]{…} or NAME{…} instead."""

    _LEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?(?=\{)")

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools, "[TOOL_CALLS]")

    def _read(self, block: str) -> list[Call]:
        stripped = block.lstrip(SPACE)
        if not stripped or stripped[0] in "[{":
            return super()._read(block)
        if lead := self._LEAD.match(stripped):
            if lead[1] not in self._tools:
                raise NotACall("it names no declared tool")
            return [read_arguments(stripped[lead.end() :], lead[1])]
        name = re.split(r"[\s\[{]", stripped, maxsplit=1)[0]
        if len(stripped) > 2 * MAX_FUNCTION_NAME_CHARS or not any(tool.startswith(name) for tool in self._tools):
            raise NotACall("it names no declared tool")
        raise Unfinished([])


class PythonicCalls(ToolParser):
    """A Python list of calls with literal arguments, `[f(a=1), g(b="x")]`, as the whole answer. Read at its end."""

    _LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
    _BEGINNING = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*)?)?")

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self._text = ""
        self._may_be_calls = True

    def push(self, text: str) -> Delta:
        self._text += text
        if self._may_be_calls and not self._LIST.match(self._text):
            self._may_be_calls = self._BEGINNING.fullmatch(self._text) is not None
        return Delta() if self._may_be_calls else Delta(self._taken())

    def finish(self, *, cut: bool) -> Delta:
        delta, text = Delta(), self._taken()
        try:
            self._pass_on(_python_calls(text, self._tools), delta)
        except NotACall:
            delta.content = text
        return delta

    def _taken(self) -> str:
        text, self._text = self._text, ""
        return text


def _python_calls(text: str, tools: Collection[str]) -> list[Call]:
    try:
        with warnings.catch_warnings():
            # Of the model's code, which is not run.
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(SPACE), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NotACall("no list of calls")
        return [_python_call(each, tools) for each in tree.elts]
    # Deep nesting and huge numbers raise some of these.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NotACall(str(error)) from error


def _python_call(node: ast.expr, tools: Collection[str]) -> Call:
    if not isinstance(node, ast.Call) or node.args or ast.unparse(node.func) not in tools:
        raise NotACall("it calls no declared tool by named arguments")
    if any(keyword.arg is None for keyword in node.keywords):
        raise NotACall("its arguments have no names")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair is a Python string, but no text.
    if not is_object(written):
        raise NotACall("its arguments are no object")
    return Call(ast.unparse(node.func), written)


HERMES_MARKS = ("<tool_call>", "</tool_call>")
FORMATS: Mapping[str, Callable[[Collection[str]], ToolParser]] = {
    "hermes": lambda tools: MarkedCalls(tools, *HERMES_MARKS),
    "llama3_json": lambda tools: MarkedCalls(tools, "<|python_tag|>", at_start="{"),
    "mistral": MistralCalls,
    "pythonic": PythonicCalls,
}
"""A parser for the tools of these names, by its format."""
MARKERS = (*HERMES_MARKS, "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<think>", "</think>")
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
