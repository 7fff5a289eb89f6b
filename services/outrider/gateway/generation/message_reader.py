"""Turns an answer to a chat into what clients read: calls with their ids, the finish reason, counted reasoning."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.generation.answers import Answer, Chunk
from outrider.gateway.generation.requests import ChatPrompt
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tools.parsers.formats import FORMATS
from outrider.gateway.tools.parsers.reasoning import CLOSE, OPEN, Thought
from outrider.gateway.tools.parsers.tool_calls import CallDelta
from outrider.gateway.tools.tools import ToolUse

Json = dict[str, Any]


@dataclass(slots=True)
class MessageReader:
    _use: ToolUse | None = None
    _id_chars: int = 24
    _ids: list[str] = field(default_factory=list)
    _thought: _ThoughtTokens = field(default_factory=lambda: _ThoughtTokens())
    _reasoned: bool = False

    @classmethod
    def of(cls, answer: Answer) -> MessageReader:
        tokenizer = answer.tokenizer
        use = answer.prompt.tools if isinstance(answer.prompt, ChatPrompt) else None
        reader = cls(use, FORMATS[tokenizer.tool_format].call_id_chars if tokenizer.tool_format else 24)
        if tokenizer.reasons:
            inside = tokenizer.thought_after(answer.prompt_token_ids) is Thought.OPEN
            reader._thought = _ThoughtTokens.of(tokenizer, inside=inside)
        return reader

    @property
    def legacy(self) -> bool:
        return self._use is not None and self._use.legacy

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far; 0 if the marks of the reasoning are no single tokens."""
        return self._thought.count if self._reasoned else 0

    def count(self, chunk: Chunk) -> None:
        self._thought.push(chunk.token_ids)
        self._reasoned |= bool(chunk.delta.reasoning)

    def finish_reason(self, reason: str) -> str:
        """To be called after all calls. With a named tool the model had no choice, so it stays `stop`, as OpenAI has
        it.
        """
        called = self._ids and self._use is not None and self._use.choice != "named"
        if not called or reason != "stop":
            return reason
        return "function_call" if self.legacy else "tool_calls"

    def call(self, delta: CallDelta) -> Json:
        """One tool call's delta, as OpenAI streams it."""
        function: Json = {"arguments": delta.arguments}
        if not delta.name:
            return {"index": delta.index, "function": function}
        self._ids.append(new_call_id(self._id_chars))
        named = {"name": delta.name} | function
        return {"index": delta.index, "id": self._ids[-1], "type": "function", "function": named}


@dataclass(slots=True)
class _ThoughtTokens:
    """Counts the tokens between the marks of the reasoning. In most reasoning models each mark is one token."""

    opening: int | None = None
    closing: int | None = None
    inside: bool = False
    count: int = 0

    @classmethod
    def of(cls, tokenizer: ModelTokenizer, *, inside: bool) -> _ThoughtTokens:
        closing = tokenizer.tokenizer.token_to_id(CLOSE)
        return cls() if closing is None else cls(tokenizer.tokenizer.token_to_id(OPEN), closing, inside)

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids if self.closing is not None else ():
            if token_id == self.closing:
                # An answer has at most one reasoning part.
                self.opening, self.inside = None, False
            elif token_id == self.opening:
                self.inside = True
            else:
                self.count += self.inside


def joined(deltas: Sequence[Json]) -> list[Json]:
    calls: list[Json] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def function_call(deltas: Sequence[Json]) -> Json:
    """The call as clients of OpenAI's older functions read it, or a part of it."""
    functions = [delta["function"] for delta in deltas]
    named = next(({"name": each["name"]} for each in functions if "name" in each), {})
    return {**named, "arguments": "".join(each["arguments"] for each in functions)}


def new_call_id(num_chars: int = 24) -> str:
    random = secrets.token_hex(num_chars)
    return random[:9] if num_chars == 9 else f"call_{random[:num_chars]}"
