"""The reasoning before an answer, between <think> and </think>. A mark without its pair is no text."""

from __future__ import annotations

from enum import Enum, auto

from outrider.gateway.tools.parsers.tool_calls import SPACE, held_back

OPEN, CLOSE = "<think>", "</think>"


class Thought(Enum):
    """Whether an answer may begin with reasoning."""

    NONE = auto()
    FREE = auto()
    """The model may open it."""
    OPEN = auto()
    """The chat template has opened it."""


class ReasoningParser:
    """Parses one answer. `inside`: the chat template has already opened the reasoning."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        """The next text is part of the reasoning."""
        self._space: list[str] = []
        """White space held back: before the first text, or before what may end the reasoning."""
        self._text = ""
        """What may become a mark."""
        self._begun = False
        """Whether it is known how the answer begins."""
        self._after = False
        self._blank = True
        """The current part is only white space so far."""

    def push(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, content) that is certain now."""
        self._text += text
        reasoning = ""
        if not self._begun:
            self._begin()
        if self._begun and self.inside:
            reasoning = self._reason()
        return reasoning, self._content() if self._after else ""

    def finish(self) -> tuple[str, str]:
        rest, self._text, self._space = "".join([*self._space, self._text]), "", []
        return (rest, "") if self.inside else ("", rest)

    def _begin(self) -> None:
        """Reasoning is at the beginning of an answer or absent. A model may repeat the mark that the template wrote."""
        text = self._text.lstrip(SPACE)
        self._space.append(self._text[: len(self._text) - len(text)])
        self._text = text
        if text.startswith(OPEN):
            self._begun, self.inside, self._text, self._space = True, True, text[len(OPEN) :], []
        elif text.startswith(CLOSE) and not self.inside:
            self._begun, self._after, self._text, self._space = True, True, text[len(CLOSE) :], []
        elif text and held_back(text, (OPEN, CLOSE)) < len(text):
            self._begun, self._after = True, not self.inside
            self._blank = self.inside

    def _reason(self) -> str:
        found, mark, rest = self._text.partition(CLOSE)
        if mark:
            thought = self._passed(found).rstrip(SPACE)
            self._text, self.inside, self._after = rest, False, True
            self._space, self._blank = [], True
            return thought
        kept = len(self._text) - held_back(self._text, (CLOSE,))
        certain, self._text = self._text[:kept], self._text[kept:]
        return self._passed(certain)

    def _passed(self, text: str) -> str:
        """White space before the end mark does not belong to the reasoning, and none before its text."""
        certain = text.rstrip(SPACE)
        if not certain:
            self._space.append(text)
            return ""
        passed = "".join([*self._space, certain])
        self._space = [text[len(certain) :]]
        return self._stripped(passed)

    def _content(self) -> str:
        content, self._text = "".join([*self._space, self._text]), ""
        self._space = []
        return self._stripped(content)

    def _stripped(self, text: str) -> str:
        if self._blank:
            text = text.lstrip(SPACE)
            self._blank = not text
        return text


class PairedMarks:
    """Removes marks of reasoning from content, except those in pairs, which belong to the text."""

    def __init__(self) -> None:
        self._earlier: list[str] = []
        """Text after an opening mark, held back until it is known whether the mark has its pair."""
        self._opened = False
        self._text = ""
        """What may become a mark."""

    def push(self, text: str) -> str:
        passed = list[str]()
        self._text += text
        at = 0
        while True:
            found = [(place, mark) for mark in (OPEN, CLOSE) if (place := self._text.find(mark, at)) >= 0]
            if not found:
                break
            place, mark = min(found)
            self._add(self._text[at:place], passed)
            at = place + len(mark)
            if mark == OPEN:
                # Of several, only the last may have its pair.
                passed += self._earlier
                self._earlier, self._opened = [], True
            elif self._opened:
                passed += [OPEN, *self._earlier, CLOSE]
                self._earlier, self._opened = [], False
        kept = max(at, len(self._text) - held_back(self._text[at:], (OPEN, CLOSE)))
        self._add(self._text[at:kept], passed)
        self._text = self._text[kept:]
        return "".join(passed)

    def _add(self, text: str, passed: list[str]) -> None:
        (self._earlier if self._opened else passed).append(text)

    def finish(self) -> str:
        rest = "".join([*self._earlier, self._text])
        self._earlier, self._opened, self._text = [], False, ""
        return rest
