"""Parses an answer in a chat into a message: reasoning first, then content and tool calls."""

from __future__ import annotations

from outrider.gateway.parsers.reasoning import ReasoningParser
from outrider.gateway.parsers.tool_calls import Delta, ToolParser


class MessageParser:
    """Parses one answer. `max_calls`: further calls are dropped; None: no limit."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser, max_calls: int | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._tools.num_calls

    def push(self, text: str, *, finished: bool) -> Delta:
        """What `text` adds; with `finished`, all that is left."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        if finished and self._reasoning is not None:
            more_reasoning, more_content = self._reasoning.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        delta = self._tools.push(content)
        if finished:
            last = self._tools.finish()
            delta.content += last.content
            delta.calls += last.calls
        delta.reasoning = reasoning
        if self._max_calls is not None:
            delta.calls = [call for call in delta.calls if call.index < self._max_calls]
        return delta
