"""The answer forms of the two endpoints: whole, or chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outrider.gateway.generation.answers import Answer, Chunk
from outrider.gateway.generation.message_reader import MessageReader, function_call, joined
from outrider.gateway.generation.requests import TextPrompt
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.json_bytes import Array
from outrider.gateway.http.openai.bodies import usage
from outrider.gateway.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from outrider.gateway.tokenizer.text import Detokeniser

Json = dict[str, Any]


@dataclass(slots=True)
class Choice(ABC):
    """Writes one answer, whole or chunk by chunk."""

    index: int
    answer: Answer
    _of_prompt: Array | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    """Whether the log probabilities of the first chunk have been read."""

    async def read(self, chunk: Chunk) -> Chunk:
        """Writes its log probabilities, which are sent with the rest; returns that. To be called with each chunk."""
        answer, asked = self.answer, self.answer.options
        if asked.prompt_logprobs is not None and not self._begun:
            given = answer.tokenizer, answer.prompt_token_ids, chunk.prompt_logprobs
            self._of_prompt = await prompt_logprobs(*given, asked.prompt_logprobs)
        if asked.shows_logprobs:
            await self._read(chunk)
        self._begun = True
        return replace(chunk, logprobs=(), prompt_logprobs=())

    @property
    def num_bytes(self) -> int:
        """Of the log probabilities that are kept."""
        of_prompt = 0 if self._of_prompt is None else len(self._of_prompt.data)
        return of_prompt + self._logprobs.num_bytes

    @property
    @abstractmethod
    def _logprobs(self) -> ChatLogprobs | CompletionLogprobs: ...

    @property
    def _found(self) -> Json | None:
        """The log probabilities since the last call, if they are shown."""
        return self._logprobs.take() if self.answer.options.shows_logprobs else None

    @abstractmethod
    async def _read(self, chunk: Chunk) -> None: ...

    @property
    def of_prompt(self) -> Json:
        """The field with the prompt's log probabilities, if they are asked for."""
        return {} if self._of_prompt is None else {"prompt_logprobs": self._of_prompt}

    @property
    def opening(self) -> Json | None:
        """What a stream sends before any text."""
        return None

    @abstractmethod
    def pieces(self, chunk: Chunk) -> Iterator[Json]:
        """What a stream sends of a chunk: the finish reason in a piece of its own, as OpenAI has it. None without
        anything new."""

    @abstractmethod
    def whole(self, chunk: Chunk) -> Json:
        """All chunks, joined into one."""

    @property
    def num_reasoning_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class AnswerShape(ABC):
    """The answer form of one endpoint."""

    id: str
    model: str
    created_s: int
    prefix: ClassVar[str]
    """Prefix of its ids."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> Choice: ...

    def whole(self, choices: list[Json], counts: Usage, of_prompt: Json) -> Json:
        """`of_prompt`: the log probabilities of the first one's prompt, which completions have in each choice."""
        return self._head(self.kind) | {"choices": choices, "usage": usage(counts)}

    def chunk(self, piece: Json) -> Json:
        return self._head(self.chunk_kind) | {"choices": [piece]}

    def closing(self, counts: Usage) -> Json:
        """The usage chunk, which has no choices."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage(counts)}

    def _head(self, kind: str) -> Json:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created_s, "model": self.model}


@dataclass(slots=True)
class _CompletionChoice(Choice):
    _logprobs: CompletionLogprobs = field(init=False)
    _echoes: bool = field(init=False)
    """Whether the prompt is still to be written."""

    def __post_init__(self) -> None:
        self._logprobs = CompletionLogprobs.begin(self.answer.tokenizer, self.answer.options.logprobs or 0)
        self._echoes = self.answer.options.echo

    async def _read(self, chunk: Chunk) -> None:
        if self.answer.options.echo and not self._begun:
            await self._logprobs.add(self.answer.prompt_token_ids, [None, *chunk.prompt_logprobs])
        if not self.answer.options.prompt_only:
            await self._logprobs.add(chunk.token_ids, chunk.logprobs)

    def pieces(self, chunk: Chunk) -> Iterator[Json]:
        text, found = self._text(chunk), self._found
        if text or found:
            yield self._written(text, found, None)
        if chunk.finish:
            yield self._written("", None, chunk.finish.reason) | chunk.signed

    def whole(self, chunk: Chunk) -> Json:
        reason = chunk.finish.reason if chunk.finish else None
        return self._written(self._text(chunk), self._found, reason) | chunk.signed | self.of_prompt

    def _text(self, chunk: Chunk) -> str:
        text = "" if self.answer.options.prompt_only else chunk.text
        if self._echoes:
            asked, self._echoes = self.answer.prompt, False
            text = (asked.text if isinstance(asked, TextPrompt) else _decoded(self.answer)) + text
        return text

    def _written(self, text: str, found: Json | None, reason: str | None) -> Json:
        return {"index": self.index, "text": text, "logprobs": found, "finish_reason": reason}


def _decoded(answer: Answer) -> str:
    detokeniser = Detokeniser(answer.tokenizer.token_bytes)
    return "".join(map(detokeniser.push, answer.prompt_token_ids)) + detokeniser.flush()


class CompletionShape(AnswerShape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, index: int, answer: Answer) -> Choice:
        return _CompletionChoice(index, answer)


@dataclass(slots=True)
class _ChatChoice(Choice):
    _reader: MessageReader = field(init=False)
    _logprobs: ChatLogprobs = field(init=False)

    def __post_init__(self) -> None:
        self._reader = MessageReader.of(self.answer)
        self._logprobs = ChatLogprobs(self.answer.tokenizer, self.answer.options.logprobs or 0)

    async def _read(self, chunk: Chunk) -> None:
        await self._logprobs.add(chunk.token_ids, chunk.logprobs)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def opening(self) -> Json:
        return self._delta({"role": "assistant", "content": ""}, None, None)

    def pieces(self, chunk: Chunk) -> Iterator[Json]:
        calls, found = self._calls(chunk), self._found
        delta: Json = {"content": chunk.text} if chunk.text else {}
        if chunk.delta.reasoning:
            delta["reasoning_content"] = chunk.delta.reasoning
        if calls:
            delta |= {"function_call": function_call(calls)} if self._reader.legacy else {"tool_calls": calls}
        if delta or found:
            yield self._delta(delta, found, None)
        if chunk.finish:
            yield self._delta({}, None, self._reader.finish_reason(chunk.finish.reason)) | chunk.signed

    def whole(self, chunk: Chunk) -> Json:
        calls, found = self._calls(chunk), self._found
        message: Json = {"role": "assistant", "content": chunk.text, "refusal": None}
        if chunk.delta.reasoning:
            message["reasoning_content"] = chunk.delta.reasoning
        if calls:
            written = {"function_call": function_call(calls)} if self._reader.legacy else {"tool_calls": joined(calls)}
            message |= {"content": chunk.text or None, **written}
        reason = self._reader.finish_reason(chunk.finish.reason) if chunk.finish else None
        return {"index": self.index, "message": message, "logprobs": found, "finish_reason": reason} | chunk.signed

    def _calls(self, chunk: Chunk) -> list[Json]:
        """The calls, or what a chunk adds to them."""
        self._reader.count(chunk)
        return [self._reader.call(each) for each in chunk.delta.calls]

    def _delta(self, delta: Json, found: Json | None, reason: str | None) -> Json:
        return {"index": self.index, "delta": delta, "logprobs": found, "finish_reason": reason}


class ChatShape(AnswerShape):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> Choice:
        return _ChatChoice(index, answer)

    def whole(self, choices: list[Json], counts: Usage, of_prompt: Json) -> Json:
        # All choices have the same prompt.
        return super().whole(choices, counts, of_prompt) | of_prompt
