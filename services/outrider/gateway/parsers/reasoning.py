"""The reasoning before an answer, between <think> and </think>."""

from __future__ import annotations

from enum import Enum, auto

from outrider.gateway.parsers.tool_calls import held_back

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
        self._after = False
        """Whether the content has begun."""
        self._blank = True
        """The current part is only white space so far."""

    def push(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, content) that is certain now."""
        self._text += text
        reasoning = ""
        if not self._after and not self.inside:
            self._open()
        if self.inside:
            reasoning = self._reason()
        return reasoning, self._content() if self._after else ""

    def finish(self) -> tuple[str, str]:
        rest, self._text = self._text, ""
        return (rest, "") if self.inside else ("", rest)

    def _open(self) -> None:
        """Reasoning is at the beginning of an answer or absent."""
        text = self._text.lstrip(_SPACE)
        if text.startswith(OPEN):
            self.inside, self._text = True, text[len(OPEN) :]
        elif text and not OPEN.startswith(text):
            self._after, self._blank = True, False

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
