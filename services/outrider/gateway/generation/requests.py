"""Requests in one form for all APIs, validated when created."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Any

from outrider.errors import InvalidRequest
from outrider.gateway.generation.logits import LogitsChoice
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.template import OWN_VARIABLES
from outrider.gateway.tools.tools import ToolUse
from outrider.limits import (
    MAX_CLIENT_STOP_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_REVISION_CHARS,
    MAX_STOP_TOKENS,
    MAX_UINT32,
)
from outrider.options.logprobs import MAX_TOP_LOGPROBS, LogprobsOptions
from outrider.rpc.v1 import router_pb2

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 1024
MAX_CHOICES = 128
MAX_VARIABLES_CHARS = 16_384
"""Most characters of a chat template's variables, written as JSON."""
MAX_VARIABLES_DEPTH = 8
MAX_VARIABLE_NAME_CHARS = 64
_TEXTS = ("content", "reasoning_content", "reasoning")
"""Parts of a message that a template may write."""
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    field: str = "prompt"
    """The client's name for it, for error messages."""

    def __post_init__(self) -> None:
        if not self.text:
            raise InvalidRequest(self.field, "is empty")
        _check_text(self.field, self.text)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[Mapping[str, Any], ...]
    """In the form that chat templates take: each has `role` (system, user, assistant, tool) and `content`, a text."""
    field: str = "messages"
    tools: ToolUse | None = None
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template, in plain JSON."""
    reads_reasoning: bool = False
    """Reasoning is separated from the answer, and a grammar applies to the answer alone."""

    def __post_init__(self) -> None:
        _check_variables("chat_template_kwargs", self.variables or {})
        check_num_messages(self.field, len(self.messages))
        for i, message in enumerate(self.messages):
            where = f"{self.field}[{i}]"
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise InvalidRequest(f"{where}.role", f"{message['role']!r} is not system, user, assistant or tool")
            _check_text(f"{where}.content", message["content"])

    @property
    def num_chars(self) -> int:
        """About as many characters as the template writes."""
        calls = sum(len(str(message["tool_calls"])) for message in self.messages if "tool_calls" in message)
        tools = len(str(self.tools.definitions)) if self.tools is not None else 0
        variables = len(str(self.variables or ""))
        texts = sum(len(str(message.get(name) or "")) for message in self.messages for name in _TEXTS)
        return texts + calls + tools + variables


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]
    """As the client sent them: checked one by one only once their number is known to be allowed."""
    field: str = "prompt"

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise InvalidRequest(self.field, "is empty")


Prompt = TextPrompt | ChatPrompt | TokenPrompt


MAY_LEAVE_OUT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of a request for which a model may have defaults of its own."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to sample and when to end. The defaults are those of the public API, for models that state no others."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    """Most output tokens; None means what the API's default and the model's context allow."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    speculation: router_pb2.SpeculationMode.ValueType = router_pb2.SPECULATION_MODE_AUTO
    max_draft_tokens: int | None = None
    include_metrics: bool = False
    ignore_eos: bool = False
    logits: LogitsChoice = field(default_factory=LogitsChoice)
    logprobs: int | None = None
    """Likeliest tokens to return at each position, in addition to the chosen one; None: no log probabilities."""
    hide_logprobs: bool = False
    """Logprobs are used to compare answers, and not shown."""
    echo: bool = False
    """The prompt is part of the answer, with its logprobs if those are requested."""
    prompt_logprobs: int | None = None
    """Likeliest tokens to return at each position of the prompt, in addition to the prompt's own; None: none at all."""
    prompt_only: bool = False
    """With echo: what follows the prompt is left out."""
    receipt: bool = False
    left_out: frozenset[str] = frozenset()
    """Fields for which the model may have a default; `repetition_penalty` is one of `logits`."""

    def with_defaults(self, defaults: Mapping[str, float]) -> Options:
        """With the model's own for the fields that are left out. `max_tokens` is none of them: see `context_length`."""
        taken: dict[str, Any] = {name: defaults[name] for name in self.left_out & defaults.keys()}
        if (penalty := taken.pop("repetition_penalty", None)) is not None:
            taken["logits"] = replace(self.logits, repetition_penalty=penalty)
        return replace(self, **taken) if taken else self

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None and not self.hide_logprobs

    @property
    def asked_logprobs(self) -> LogprobsOptions | None:
        """The most that any of the options needs."""
        most = max((count for count in (self.logprobs, self.prompt_logprobs) if count is not None), default=None)
        return None if most is None else LogprobsOptions(most, self.echo or self.prompt_logprobs is not None)

    def __post_init__(self) -> None:
        # Messages have 32-bit floats, so the rounded values have to be in range.
        _require("temperature", self.temperature, 0 <= _float32(self.temperature) < math.inf, "finite and at least 0")
        _require("top_p", self.top_p, 0 < _float32(self.top_p) <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= _float32(self.min_p) <= 1, "from 0 to 1")
        _require("top_k", self.top_k, 0 <= self.top_k < 2**31, "from 0 (no limit) to 2147483647")
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed <= _UINT64_MAX, "from 0 to 2^64 - 1")
        if self.max_tokens is not None:
            _require("max_tokens", self.max_tokens, 1 <= self.max_tokens <= MAX_UINT32, "at least 1 and below 2^32")
        if self.max_draft_tokens is not None:
            allowed = 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS
            _require("max_draft_tokens", self.max_draft_tokens, allowed, f"from 0 to {MAX_DRAFT_TOKENS}")
        if self.max_tokens is not None and self.logits.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.logits.min_tokens} is more than max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require(name, count, 0 <= count <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}")
        if self.logits.structured is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos", f"cannot be combined with {self.logits.structured.field}")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest("stop", f"{len(self.stop)} stop strings; at most {MAX_STOPS} are allowed")
        for i, stop in enumerate(self.stop):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                message = f"{len(stop)} characters; a stop string has 1 to {MAX_STOP_CHARS}"
                raise InvalidRequest(f"stop[{i}]", message)
            _check_text(f"stop[{i}]", stop)
        # With ignore_eos none of the model's are added: a receipt's list may have both.
        most = MAX_STOP_TOKENS if self.ignore_eos else MAX_CLIENT_STOP_TOKENS
        if len(self.stop_token_ids) > most:
            message = f"{len(self.stop_token_ids)} ids; at most {most} are allowed"
            raise InvalidRequest("stop_token_ids", message)


@dataclass(frozen=True, slots=True)
class Generation:
    """One request."""

    model: str
    prompt: Prompt
    options: Options = field(default_factory=Options)
    prediction: str = ""
    """The text that the client expects. It is used as a draft and changes no answer."""
    resume_token_ids: Sequence[int] = ()
    """Output tokens that the client has from an interrupted answer. The answer continues after them."""
    resume_revision: str = ""
    """Model revision that produced them; empty if the client does not know it."""

    def __post_init__(self) -> None:
        _check_text("prediction", self.prediction)
        if len(self.resume_revision) > MAX_REVISION_CHARS:
            raise InvalidRequest("resume_revision", f"has to have at most {MAX_REVISION_CHARS} characters")

    def for_model(self, tokenizer: ModelTokenizer) -> Generation:
        """With the model's defaults for what the request leaves out."""
        return replace(self, options=self.options.with_defaults(tokenizer.sampling_defaults))

    def with_receipt(self) -> Generation:
        """The same request with a receipt, unless there is no answer to sign. If it samples it gets a seed, because in
        ratio mode the text also depends on the drafts. A drawn seed is below 2^53, so that it is exact in JavaScript.
        """
        if self.options.prompt_only:
            return self
        seed = self.options.seed if self.options.seed is not None or not self.options.temperature else randbits(53)
        return replace(self, options=replace(self.options, receipt=True, seed=seed))


def numbered(options: Options, count: int) -> list[Options]:
    """The options of `count` answers to one prompt: each has its own seed, as in vLLM."""
    if options.seed is None:
        return [options] * count
    return [replace(options, seed=(options.seed + number) % 2**64) for number in range(count)]


def check_num_messages(where: str, num_messages: int) -> None:
    """To be called before the messages are checked one by one: a body may hold millions."""
    if not 1 <= num_messages <= MAX_MESSAGES:
        raise InvalidRequest(where, f"{num_messages} messages; 1 to {MAX_MESSAGES} are allowed")


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def _require(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(name, f"{value} is not allowed; it has to be {allowed}")


def _check_variables(where: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if not (name.isidentifier() and len(name) <= MAX_VARIABLE_NAME_CHARS):
            message = f"its keys have to be names of variables, of at most {MAX_VARIABLE_NAME_CHARS} characters"
            raise InvalidRequest(where, message)
        if name in OWN_VARIABLES:
            raise InvalidRequest(f"{where}.{name}", "cannot be set by a client")
    if (num_chars := len(json.dumps(given))) > MAX_VARIABLES_CHARS:
        raise InvalidRequest(where, f"{num_chars} characters; at most {MAX_VARIABLES_CHARS} are allowed")
    if _depth(given) > MAX_VARIABLES_DEPTH:
        raise InvalidRequest(where, f"is nested deeper than {MAX_VARIABLES_DEPTH}")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max(map(_depth, inner), default=0) + isinstance(value, Mapping | list)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(where, "holds half a surrogate pair, which is not text") from error
