"""The answer forms of the two endpoints: whole, or chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outrider.gateway.generation.generation import Answer, Chunk
from outrider.gateway.generation.message_reader import MessageReader, function_call, joined
from outrider.gateway.generation.requests import TextPrompt
from outrider.gateway.generation.stats import Usage
from outrider.gateway.http.openai import logprobs
from outrider.gateway.http.openai.bodies import usage
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.options.logprobs import TokenLogprobs

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
    prompt_logprobs: list[Json | None] | None = None
    legacy: bool = False
    """Whether a call is written in OpenAI's older form."""
    receipt: str = ""

    @property
    def parts(self) -> list[Written]:
        """What a stream sends: the finish reason in a part of its own, as OpenAI has it. None without anything new."""
        adds = self.text or self.logprobs or self.reasoning or self.tool_calls
        parts = [replace(self, finish_reason=None, receipt="")] if adds else []
        end = Written(self.index, "", None, self.finish_reason, receipt=self.receipt)
        return [*parts, end] if self.finish_reason else parts

    @property
    def signed(self) -> Json:
        """The receipt's field, if requested."""
        return {"receipt": self.receipt} if self.receipt else {}


@dataclass(slots=True)
class Choice(ABC):
    """Writes one answer."""

    index: int
    answer: Answer

    @abstractmethod
    def write(self, chunk: Chunk) -> Written:
        """Writes one chunk, or all chunks joined into one."""

    @property
    def num_reasoning_tokens(self) -> int:
        return 0

    def _prompt_logprobs(self, chunk: Chunk) -> list[Json | None] | None:
        answer, num_top = self.answer, self.answer.options.prompt_logprobs
        if num_top is None:
            return None
        return logprobs.prompt(answer.tokenizer, answer.prompt_token_ids, chunk.prompt_logprobs, num_top)


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
    _logprobs: logprobs.CompletionLogprobs = field(init=False)
    _begun: bool = False

    def __post_init__(self) -> None:
        self._logprobs = logprobs.CompletionLogprobs.begin(self.answer.tokenizer, self.answer.options.logprobs or 0)

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
        of_prompt = self._prompt_logprobs(chunk)
        reason = chunk.finish.reason if chunk.finish else None
        return Written(self.index, text, written, reason, prompt_logprobs=of_prompt, receipt=chunk.receipt)


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

    def __post_init__(self) -> None:
        self._reader = MessageReader.of(self.answer)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def write(self, chunk: Chunk) -> Written:
        written, options = None, self.answer.options
        if options.shows_logprobs:
            written = logprobs.chat(self.answer.tokenizer, chunk.token_ids, chunk.logprobs, options.logprobs or 0)
        self._reader.count(chunk)
        delta = chunk.delta
        calls = tuple(self._reader.call(each) for each in delta.calls)
        reason = self._reader.finish_reason(chunk.finish.reason) if chunk.finish else None
        of_prompt = self._prompt_logprobs(chunk)
        said = delta.content, written, reason, delta.reasoning, calls, of_prompt
        return Written(self.index, *said, legacy=self._reader.legacy, receipt=chunk.receipt)


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
