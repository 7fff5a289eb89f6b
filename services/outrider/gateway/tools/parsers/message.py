"""Parses an answer in a chat into a message: reasoning first, then content and tool calls."""

from __future__ import annotations

from outrider.gateway.tools.parsers.reasoning import PairedMarks, ReasoningParser
from outrider.gateway.tools.parsers.tool_calls import Delta, ToolParser


class MessageParser:
    """Parses one answer. `max_calls`: further calls are dropped; None: no limit.

    `verbatim`: a grammar makes the content, so that marks of reasoning in it are text.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser,
        max_calls: int | None = None,
        *,
        verbatim: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._marks = None if verbatim else PairedMarks()
        self._tools = tools
        self._max_calls = max_calls

    def push(self, text: str) -> Delta:
        """What `text` adds."""
        if self._reasoning is None:
            return self._kept(self._tools.push(text))
        reasoning, content = self._reasoning.push(text)
        delta = self._kept(self._tools.push(content))
        delta.reasoning = reasoning
        if self._marks is not None:
            delta.content = self._marks.push(delta.content)
        return delta

    def finish(self, *, cut: bool) -> Delta:
        """What was held back. `cut`: the answer's length ended it."""
        if self._reasoning is None:
            return self._kept(self._tools.finish(cut=cut))
        reasoning, content = self._reasoning.finish()
        delta = self._tools.push(content)
        delta.add(self._tools.finish(cut=cut))
        delta.reasoning = reasoning
        if self._marks is not None:
            delta.content = self._marks.push(delta.content) + self._marks.finish()
        return self._kept(delta)

    def _kept(self, delta: Delta) -> Delta:
        if self._max_calls is not None:
            delta.calls = [call for call in delta.calls if call.index < self._max_calls]
        return delta
