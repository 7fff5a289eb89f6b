"""Splits a growing text into content and tool calls.

What may be a call is held back. It is passed on as a call once it is complete, and calls declared tools with JSON
objects as arguments; or if the answer's length cut it off within its arguments. Else all its text is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The declared tools: the JSON schema of the arguments, by name."""
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of one call."""

    index: int
    name: str = ""
    """With the first delta of a call."""
    arguments: str = ""
    at: int = field(default=0, compare=False)
    """How much of the content that comes with it precedes it."""


@dataclass(slots=True)
class Delta:
    """The parts of a message that a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += [replace(call, at=len(self.content)) for call in other.calls]

    @classmethod
    def join(cls, deltas: Iterable[Delta]) -> Delta:
        """The whole message, with one delta for each call."""
        each = list(deltas)
        whole = cls("".join(one.content for one in each), "".join(one.reasoning for one in each))
        whole.calls = [call for one in each for call in one.calls]
        whole.merge()
        return whole

    def merge(self) -> None:
        of_calls = [list(deltas) for _, deltas in groupby(self.calls, key=lambda each: each.index)]
        self.calls = [replace(each[0], arguments="".join(d.arguments for d in each)) for each in of_calls]


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    last = text[-longest:] if longest > 0 else ""
    # Nearly all text has no such character, and this is asked for every token.
    if not any(marker[0] in last for marker in markers if marker):
        return 0
    for count in range(len(last), 0, -1):
        if any(marker.startswith(last[-count:]) for marker in markers):
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


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write calls."""

    parser: Callable[[Tools], ToolParser]
    marks: tuple[str, ...] = ()
    """Tokens that are part of the text here, even if a vocabulary has them as special tokens."""
    hints: tuple[str, ...] = ()
    """What a prompt with tools has, all of it, if its template tells the model of this format and writes no calls."""
    bare: bool = False
    """Calls have no marks: a model may be told of marks that its template does not write."""
    call_id_chars: int = 24


FORMATS: dict[str, Format] = {}
"""By name. `formats` has all."""
