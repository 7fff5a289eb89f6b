"""The reasoning before an answer, between <think> and </think>. A mark without its pair is no text."""

from __future__ import annotations

from enum import Enum, auto

from outrider.gateway.tools.parsers.tool_calls import held_back

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"


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
        self._text = ""
        """Text held back."""
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
        rest, self._text = self._text, ""
        return (rest, "") if self.inside else ("", rest)

    def _begin(self) -> None:
        """Reasoning is at the beginning of an answer or absent. A model may repeat the mark that the template wrote."""
        text = self._text.lstrip(_SPACE)
        if text.startswith(OPEN):
            self._begun, self.inside, self._text = True, True, text[len(OPEN) :]
        elif text.startswith(CLOSE) and not self.inside:
            self._begun, self._after, self._text = True, True, text[len(CLOSE) :]
        elif text and held_back(text, (OPEN, CLOSE)) < len(text):
            self._begun, self._after = True, not self.inside
            self._blank = self.inside

    def _reason(self) -> str:
        found, mark, rest = self._text.partition(CLOSE)
        if mark:
            self._text, self.inside, self._after = rest, False, True
            thought, self._blank = self._stripped(found), True
            return thought.rstrip(_SPACE)
        kept = len(self._text) - held_back(self._text, (CLOSE,))
        # White space before the end mark does not belong to the reasoning.
        certain = self._text[:kept].rstrip(_SPACE)
        self._text = self._text[len(certain) :]
        return self._stripped(certain)

    def _content(self) -> str:
        content, self._text = self._stripped(self._text), ""
        return content

    def _stripped(self, text: str) -> str:
        if self._blank:
            text = text.lstrip(_SPACE)
            self._blank = not text
        return text


class PairedMarks:
    """Removes marks of reasoning from content, except those in pairs, which belong to the text."""

    def __init__(self) -> None:
        self._text = ""
        """Held back: text after an opening mark, or what may become a mark."""

    def push(self, text: str) -> str:
        self._text += text
        passed = ""
        while (closing := self._text.find(CLOSE)) >= 0:
            end = closing + len(CLOSE)
            before, mark, self._text = self._text[:closing], self._text[closing:end], self._text[end:]
            unpaired, opening_mark, thought = before.rpartition(OPEN)
            passed += unpaired.replace(OPEN, "") + opening_mark + thought + (mark if opening_mark else "")
        opening = self._text.find(OPEN)
        kept = len(self._text) - held_back(self._text, (OPEN, CLOSE)) if opening < 0 else opening
        passed, self._text = passed + self._text[:kept], self._text[kept:]
        return passed

    def finish(self) -> str:
        rest, self._text = self._text.replace(OPEN, ""), ""
        return rest
