"""How the two endpoints write answers: whole, or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.gateway.generation import Answer, Chunk
from outrider.gateway.http import logprobs
from outrider.gateway.http.bodies import usage
from outrider.gateway.message_reader import MessageReader, joined
from outrider.gateway.requests import TextPrompt
from outrider.gateway.stats import Usage
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.options.logprobs import TokenLogprobs

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Of one choice: a piece of it, or all."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: tuple[Json, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether there is anything to be sent."""
        return bool(self.text or self.logprobs or self.finish_reason or self.reasoning or self.tool_calls)


class Choice(Protocol):
    """One answer on its way to the client."""

    index: int

    def write(self, chunk: Chunk) -> Written:
        """What this chunk adds, or all chunks joined to one."""


class Shape(Protocol):
    """How one endpoint writes answers."""

    def choice(self, index: int, answer: Answer) -> Choice: ...

    def whole(self, choices: list[Written], counts: Usage) -> Json: ...

    def opening(self, index: int) -> list[Json]:
        """What a choice begins with in a stream, before any text."""

    def piece(self, written: Written) -> Json: ...

    def closing(self, counts: Usage) -> Json:
        """The usage chunk, which has no choice."""


@dataclass(slots=True)
class _CompletionChoice:
    index: int
    answer: Answer
    _logprobs: logprobs.CompletionLogprobs = field(init=False)
    _begun: bool = False

    def __post_init__(self) -> None:
        self._logprobs = logprobs.CompletionLogprobs.begin(self.answer.tokenizer)

    def write(self, chunk: Chunk) -> Written:
        options = self.answer.options
        text, token_ids, found = chunk.text, list(chunk.token_ids), list[TokenLogprobs | None](chunk.logprobs)
        if options.prompt_only:
            text, token_ids, found = "", [], []
        if options.echo and not self._begun:
            prompt = self.answer.prompt_token_ids
            asked = self.answer.prompt
            text = (asked.text if isinstance(asked, TextPrompt) else _decoded(self.answer)) + text
            token_ids, found = [*prompt, *token_ids], [None, *chunk.prompt_logprobs, *found]
        self._begun = True
        written = self._logprobs.write(token_ids, found) if options.shows_logprobs else None
        return Written(self.index, text, written, chunk.finish.reason if chunk.finish else None)


def _decoded(answer: Answer) -> str:
    detokeniser = Detokeniser(answer.tokenizer.token_bytes)
    return "".join(map(detokeniser.push, answer.prompt_token_ids)) + detokeniser.flush()


@dataclass(frozen=True, slots=True)
class CompletionShape:
    id: str
    model: str
    created_s: int

    def choice(self, index: int, answer: Answer) -> Choice:
        return _CompletionChoice(index, answer)

    def whole(self, choices: list[Written], counts: Usage) -> Json:
        return self._head() | {"choices": [_completion_choice(each) for each in choices], "usage": usage(counts)}

    def opening(self, index: int) -> list[Json]:
        return []

    def piece(self, written: Written) -> Json:
        return self._head() | {"choices": [_completion_choice(written)]}

    def closing(self, counts: Usage) -> Json:
        return self._head() | {"choices": [], "usage": usage(counts)}

    def _head(self) -> Json:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
        }


def _completion_choice(written: Written) -> Json:
    return {
        "index": written.index,
        "text": written.text,
        "logprobs": written.logprobs,
        "finish_reason": written.finish_reason,
    }


@dataclass(slots=True)
class _ChatChoice:
    index: int
    answer: Answer
    _reader: MessageReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = MessageReader.of(self.answer)

    def write(self, chunk: Chunk) -> Written:
        written = None
        if self.answer.options.shows_logprobs:
            written = logprobs.chat(self.answer.tokenizer, chunk.token_ids, chunk.logprobs)
        delta = self._reader.push(chunk.text, finished=chunk.finish is not None)
        reason = self._reader.finish_reason(chunk.finish.reason) if chunk.finish else None
        calls = tuple(self._reader.call(each) for each in delta.calls)
        return Written(self.index, delta.content, written, reason, delta.reasoning, calls)


@dataclass(frozen=True, slots=True)
class ChatShape:
    id: str
    model: str
    created_s: int

    def choice(self, index: int, answer: Answer) -> Choice:
        return _ChatChoice(index, answer)

    def whole(self, choices: list[Written], counts: Usage) -> Json:
        written = [
            {
                "index": each.index,
                "message": _message(each),
                "logprobs": each.logprobs,
                "finish_reason": each.finish_reason,
            }
            for each in choices
        ]
        return self._head("chat.completion") | {"choices": written, "usage": usage(counts)}

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None)]

    def piece(self, written: Written) -> Json:
        delta: Json = {"content": written.text} if written.text else {}
        if written.reasoning:
            delta["reasoning_content"] = written.reasoning
        if written.tool_calls:
            delta["tool_calls"] = written.tool_calls
        return self._chunk(written.index, delta, written.logprobs, written.finish_reason)

    def closing(self, counts: Usage) -> Json:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage(counts)}

    def _head(self, kind: str) -> Json:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created_s, "model": self.model}

    def _chunk(self, index: int, delta: Json, found: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": finish_reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}


def _message(written: Written) -> Json:
    message: Json = {"role": "assistant", "content": written.text, "refusal": None}
    if written.reasoning:
        message["reasoning_content"] = written.reasoning
    if written.tool_calls:
        message |= {"content": written.text or None, "tool_calls": joined(written.tool_calls)}
    return message
