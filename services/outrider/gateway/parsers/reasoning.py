"""What a model thinks before it answers, between <think> and </think>."""

from __future__ import annotations

from enum import Enum, auto

from outrider.gateway.parsers.tool_calls import held_back

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"


class Thought(Enum):
    """Whether an answer may begin with one."""

    NONE = auto()
    FREE = auto()
    """The model opens it, or does not think."""
    OPEN = auto()
    """The chat template has opened it."""


class ReasoningParser:
    """Of one answer. `inside`: the chat template has opened the reasoning already."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        """What comes is a part of the reasoning."""
        self._text = ""
        """Not passed on yet."""
        self._after = False
        """Whether the answer proper has begun."""
        self._blank = True
        """Nothing but white space has come of the part under way."""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that is certain now."""
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
        """Reasoning stands at the beginning, or nowhere."""
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
        # The white space before the end is no part of it.
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
