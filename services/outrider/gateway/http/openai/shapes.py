"""The answer forms of the two endpoints: whole, or chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


@dataclass(frozen=True, slots=True)
class Written:
    """One choice, or a part of it, as written to the client."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: tuple[Json, ...] = ()
    prompt_logprobs: Array | None = None
    legacy: bool = False
    """Whether a call is written in OpenAI's older form."""
    signed: Json = field(default_factory=dict)
    """Further fields of the end."""

    @property
    def parts(self) -> list[Written]:
        """What a stream sends: the finish reason in a part of its own, as OpenAI has it. None without anything new."""
        adds = self.text or self.logprobs or self.reasoning or self.tool_calls
        parts = [replace(self, finish_reason=None, signed={})] if adds else []
        end = Written(self.index, "", None, self.finish_reason, signed=self.signed)
        return [*parts, end] if self.finish_reason else parts


@dataclass(slots=True)
class Choice(ABC):
    """Writes one answer."""

    index: int
    answer: Answer
    _of_prompt: Array | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    """Whether the log probabilities of the first chunk have been read."""

    async def read(self, chunk: Chunk) -> Chunk:
        """Writes its log probabilities, which `write` adds; returns the rest of it. To be called with each chunk."""
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

    @abstractmethod
    async def _read(self, chunk: Chunk) -> None: ...

    @abstractmethod
    def write(self, chunk: Chunk) -> Written:
        """Writes one chunk, or all chunks joined into one."""

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

    @abstractmethod
    def whole(self, choices: list[Written], counts: Usage) -> Json: ...

    def opening(self, index: int) -> list[Json]:
        """The first chunks of a choice in a stream, before any text."""
        return []

    @abstractmethod
    def piece(self, written: Written) -> Json: ...

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

    def write(self, chunk: Chunk) -> Written:
        options = self.answer.options
        text = "" if options.prompt_only else chunk.text
        if self._echoes:
            asked, self._echoes = self.answer.prompt, False
            text = (asked.text if isinstance(asked, TextPrompt) else _decoded(self.answer)) + text
        written = self._logprobs.take() if options.shows_logprobs else None
        reason = chunk.finish.reason if chunk.finish else None
        return Written(self.index, text, written, reason, prompt_logprobs=self._of_prompt, signed=chunk.signed)


def _decoded(answer: Answer) -> str:
    detokeniser = Detokeniser(answer.tokenizer.token_bytes)
    return "".join(map(detokeniser.push, answer.prompt_token_ids)) + detokeniser.flush()


class CompletionShape(AnswerShape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, index: int, answer: Answer) -> Choice:
        return _CompletionChoice(index, answer)

    def whole(self, choices: list[Written], counts: Usage) -> Json:
        written = [_completion_choice(each) | _of_prompt(each) for each in choices]
        return self._head(self.kind) | {"choices": written, "usage": usage(counts)}

    def piece(self, written: Written) -> Json:
        return self._head(self.chunk_kind) | {"choices": [_completion_choice(written)]}


def _completion_choice(written: Written) -> Json:
    return {
        "index": written.index,
        "text": written.text,
        "logprobs": written.logprobs,
        "finish_reason": written.finish_reason,
    } | written.signed


def _of_prompt(written: Written) -> Json:
    return {} if written.prompt_logprobs is None else {"prompt_logprobs": written.prompt_logprobs}


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

    def write(self, chunk: Chunk) -> Written:
        written = self._logprobs.take() if self.answer.options.shows_logprobs else None
        self._reader.count(chunk)
        delta = chunk.delta
        calls = tuple(self._reader.call(each) for each in delta.calls)
        reason = self._reader.finish_reason(chunk.finish.reason) if chunk.finish else None
        said = delta.content, written, reason, delta.reasoning, calls, self._of_prompt
        return Written(self.index, *said, legacy=self._reader.legacy, signed=chunk.signed)


class ChatShape(AnswerShape):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

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
            | each.signed
            for each in choices
        ]
        # All choices have the same prompt.
        return self._head(self.kind) | {"choices": written, "usage": usage(counts)} | _of_prompt(choices[0])

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None, None)]

    def piece(self, written: Written) -> Json:
        delta: Json = {"content": written.text} if written.text else {}
        if written.reasoning:
            delta["reasoning_content"] = written.reasoning
        if written.tool_calls:
            delta |= _calls(written)
        return self._chunk(written.index, delta, written.logprobs, written.finish_reason, written.signed)

    def _chunk(
        self, index: int, delta: Json, found: Json | None, finish_reason: str | None, signed: Json | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": finish_reason} | (signed or {})
        return self._head(self.chunk_kind) | {"choices": [choice]}


def _message(written: Written) -> Json:
    message: Json = {"role": "assistant", "content": written.text, "refusal": None}
    if written.reasoning:
        message["reasoning_content"] = written.reasoning
    if written.tool_calls:
        calls = _calls(written) if written.legacy else {"tool_calls": joined(written.tool_calls)}
        message |= {"content": written.text or None, **calls}
    return message


def _calls(written: Written) -> Json:
    """The calls, or what a chunk adds to them."""
    calls = written.tool_calls
    return {"function_call": function_call(calls)} if written.legacy else {"tool_calls": calls}
