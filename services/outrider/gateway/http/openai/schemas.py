"""Request bodies of the OpenAI-compatible endpoints, and their conversion.

An option that is not served is refused by name, unless its value asks for what happens anyway (`n: 1`,
`logprobs: false`). Only options without effect on the answer, by OpenAI's definition, with the models that are served
here, or by that of another server (`foreign`), are ignored silently. An unknown field is an error, unless the gateway
ignores those: then the answer says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from outrider.errors import InvalidRequest
from outrider.gateway.fields import from_json, ignored_of
from outrider.gateway.generation.logits import LogitsChoice
from outrider.gateway.generation.requests import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOPS,
    MAY_LEAVE_OUT,
    ChatPrompt,
    Generation,
    Options,
    Prompt,
    TextPrompt,
    TokenPrompt,
    numbered,
)
from outrider.gateway.http.errors import HttpError, from_outrider, unsupported
from outrider.gateway.http.openai.foreign import HARMLESS_NAMES, UNSERVED, check_ollama, thinking_type
from outrider.gateway.http.openai.messages import message, prediction
from outrider.gateway.http.openai.tools import function_use, tool_use
from outrider.gateway.tools.structured import (
    GUIDED,
    Grammatical,
    Structured,
    from_guided,
    from_response_format,
    from_structured_outputs,
)
from outrider.gateway.tools.tool_grammar import of_tools
from outrider.gateway.tools.tools import MAX_TOOLS, ToolUse
from outrider.limits import MAX_CLIENT_STOP_TOKENS
from outrider.options.logits import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_BIASES
from outrider.rpc.v1 import router_pb2

# Options of OpenAI's API that are not served, with the values that are accepted: they change nothing.
_UNSERVED_COMPLETION = UNSERVED | {
    "add_special_tokens": (True,),
    "suffix": ("",),
}
_UNSERVED_CHAT = UNSERVED | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}
# Checked before the entries are checked one by one: a body has room for millions of faults, and to describe them all
# takes many seconds. `metadata` as OpenAI documents it.
_MAX_ENTRIES = {
    "messages": MAX_MESSAGES,
    "metadata": 16,
    "chat_template_kwargs": 64,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_CLIENT_STOP_TOKENS,
    "stream_options": 16,
    "logit_bias": MAX_BIASES,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "bad_words": MAX_BAD_WORDS,
    "tools": MAX_TOOLS,
    "functions": MAX_TOOLS,
}

_READ_ONCE = {
    *("messages", "system", "prompt", "input", "prediction", "functions", "chat_template_kwargs"),
    *("options", "prompt_cache_options", "client_metadata"),
}
"""Fields that matter until there are generations of them."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_REASONING = ("effort", "summary", "generate_summary", "enabled")

# vLLM's other values for the defaults.
_ALL = -1
_ANY_SEED = -1


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    return [_whole(each) for each in values] if isinstance(values, list) and float in set(map(type, values)) else values


# Encoders of languages that know one kind of number write 2.0. In JSON that is the integer 2.
Int = Annotated[int, BeforeValidator(_whole)]
# Checked up to the first fault: a body has room for millions.
Ints = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_all_whole)]
Strings = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Random letters in each chunk, against traffic analysis."""
    continuous_usage_stats: bool | None = None
    """An option of vLLM: usage with every chunk, for its choice so far."""


class Body(BaseModel):
    """A body of any endpoint."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Options of the OpenAI API that are not served, with the values that are accepted: they change nothing."""
    said: ClassVar[tuple[str, ...]] = ()
    """Fields that are taken and not looked at, and which the answer names."""
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """What was sent and is not looked at, for the header of the answer."""
        return self._ignored

    @classmethod
    def check_headers(cls, headers: Mapping[str, str]) -> None:
        """Raises HttpError for a header that asks for another form of the API."""

    def client_name(self, field: str) -> str:
        """The client's name of a field, which may be a path."""
        return field


class GenerationBody(Body):
    """Fields of all endpoints that generate. None means the default."""

    max_tokens_by_default: ClassVar[int | None]
    """Most output tokens where the client gives no number; None: what the context holds."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    stop: Any = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    n: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ints | None = None
    bad_words: Strings | None = None
    min_tokens: Int | None = None
    response_format: Any = None
    prediction: Any = None
    prompt_logprobs: Int | None = None
    structured_outputs: Any = None
    # vLLM's older names.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    speculation: Literal["auto", "on", "off"] | None = None
    max_draft_tokens: Int | None = None
    # vLLM's names for the two above.
    num_speculative_tokens: Int | None = None
    disable_spec_decode: bool | None = None
    include_metrics: bool | None = None
    receipt: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # No effect on the answer, by OpenAI's definition.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    """Nothing is ever stored."""
    service_tier: str | None = None
    # vLLM's; the answer's id is the gateway's own.
    request_id: str | None = None
    # Ollama's, of how it loads a model.
    options: dict[str, Any] | None = None
    # GLM's: false is greedy.
    do_sample: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        """As the client gave it."""
        return self.max_tokens

    @property
    def token_limit(self) -> int | None:
        return None if self.asked_tokens == _ALL else self.asked_tokens

    @property
    def default_max_tokens(self) -> int | None:
        return None if self.asked_tokens == _ALL else self.max_tokens_by_default

    @property
    def field_names(self) -> dict[str, str]:
        """Our name of a field → the client's, where they differ."""
        return {} if self.num_speculative_tokens is None else {"max_draft_tokens": "num_speculative_tokens"}

    def client_name(self, field: str) -> str:
        return self.field_names.get(field, field)

    @property
    def num_choices(self) -> int:
        """Answers shown for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_answers(self) -> int:
        """Answers generated for each prompt."""
        return self.num_choices

    def generations(self) -> list[list[Generation]]:
        """By prompt, one for each answer. Raises InvalidRequest or HttpError, naming the field."""
        check_ollama(self.options)
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequest("n", f"{self.num_choices} is not allowed; it has to be from 1 to {MAX_CHOICES}")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "is not allowed with stream: true")
        options, prompts, predicted = self._options(), self.to_prompts(), prediction(self.prediction)
        if (count := len(prompts) * self.num_answers) > MAX_CHOICES:
            raise InvalidRequest("prompt", f"{count} answers in one request; at most {MAX_CHOICES} are allowed")
        return [
            [Generation(self.model, prompt, each, predicted) for each in numbered(options, self.num_answers)]
            for prompt in prompts
        ]

    def forget(self) -> None:
        """Drops what is read once: parsed, it may be 25 times as long as it was sent."""
        for name in _READ_ONCE & type(self).model_fields.keys():
            setattr(self, name, None)

    def _speculation(self) -> router_pb2.SpeculationMode.ValueType:
        if self.disable_spec_decode and self.speculation == "on":
            raise InvalidRequest("disable_spec_decode", "contradicts speculation: on")
        mode = "off" if self.disable_spec_decode else self.speculation or "auto"
        return router_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{mode.upper()}")

    def _max_draft_tokens(self) -> int | None:
        if None not in (self.max_draft_tokens, self.num_speculative_tokens):
            raise InvalidRequest("num_speculative_tokens", "means max_draft_tokens; give one of them")
        return self.num_speculative_tokens if self.max_draft_tokens is None else self.max_draft_tokens

    def _num_logprobs(self) -> int | None:
        """Number of logprobs for each position; None if not requested."""
        return None

    def _options(self) -> Options:
        return Options(
            temperature=0.0 if self.do_sample is False else 1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, _ALL) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=None if self.seed == _ANY_SEED else self.seed,
            max_tokens=self.token_limit,
            stop=_stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            speculation=self._speculation(),
            max_draft_tokens=self._max_draft_tokens(),
            include_metrics=bool(self.include_metrics),
            ignore_eos=bool(self.ignore_eos),
            logits=self._logits(),
            logprobs=self._num_logprobs(),
            prompt_logprobs=self.prompt_logprobs,
            receipt=bool(self.receipt),
            left_out=self._left_out(),
        )

    def _left_out(self) -> frozenset[str]:
        stated = {"temperature"} if self.do_sample is False else set[str]()
        return frozenset(name for name in MAY_LEAVE_OUT if getattr(self, name) is None) - stated

    def _logits(self) -> LogitsChoice:
        if self.allowed_token_ids == []:
            raise InvalidRequest("allowed_token_ids", "is empty: no token could be chosen")
        return LogitsChoice(
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((_token_id("logit_bias", name), bias) for name, bias in (self.logit_bias or {}).items()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            words=tuple(self.bad_words or ()),
            min_tokens=self.min_tokens or 0,
            structured=self._structured(),
        )

    def _structured(self) -> Grammatical | None:
        return self._asked_format()

    def _asked_format(self) -> Structured | None:
        """The requested format, from one of the fields that may set it."""
        found = list(self._formats())
        if len(found) > 1:
            first, second = (each.field.partition(".")[0] for each in found[:2])
            raise InvalidRequest(second, f"cannot be combined with {first}")
        return found[0] if found else None

    def _formats(self) -> Iterator[Structured]:
        if self.response_format is not None and (found := from_response_format(self.response_format)):
            yield found
        if self.structured_outputs is not None:
            yield from_structured_outputs(self.structured_outputs)
        for name in GUIDED:
            if (value := getattr(self, name)) is not None:
                yield from_guided(name, value)

    def to_prompts(self) -> list[Prompt]:
        raise NotImplementedError


class CompletionRequest(GenerationBody):
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = _UNSERVED_COMPLETION
    max_tokens_by_default: ClassVar[int | None] = 16
    """As OpenAI documents it."""

    prompt: Any
    best_of: Int | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    @property
    def num_answers(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    def _options(self) -> Options:
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        if not (self.echo and self.max_tokens == 0):
            hide = self.logprobs is None
            return replace(super()._options(), echo=bool(self.echo), hide_logprobs=hide)
        if self.receipt:
            raise InvalidRequest("receipt", "is not allowed with max_tokens: 0, as there is no answer to sign")
        # The prompt's logprobs arrive with the first output token, so one has to be generated.
        asked = self.model_copy(update={"max_tokens": 1})
        return replace(super(CompletionRequest, asked)._options(), echo=True, prompt_only=True)

    def _check_best_of(self, best_of: int) -> None:
        if not self.num_choices <= best_of <= MAX_CHOICES:
            allowed = f"from n, {self.num_choices}, to {MAX_CHOICES}"
            raise InvalidRequest("best_of", f"{best_of} is not allowed; it has to be {allowed}")
        if self.stream and best_of > self.num_choices:
            raise InvalidRequest(
                "best_of", "is not allowed with stream: true: the best answer is known only at the end"
            )

    def _num_logprobs(self) -> int | None:
        # The best answers are chosen by their logprobs.
        return 0 if self.logprobs is None and self.num_answers > self.num_choices else self.logprobs

    def to_prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
            return [_prompt("prompt", prompt)]
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest("prompt", f"{len(prompt)} prompts; at most {MAX_CHOICES} are allowed")
        if len(prompt) == 1:
            return [_prompt("prompt", prompt[0])]
        return [_prompt(f"prompt[{index}]", each) for index, each in enumerate(prompt)]


class MessageBody(GenerationBody):
    """Fields of the endpoints that answer with messages."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    """Chats may have it too, as with OpenRouter."""
    # The same of DashScope, of Ollama, and of Anthropic, DeepSeek and GLM.
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        """How much the model shall reason; None: its default. Raises InvalidRequest."""
        if isinstance(self.think, str):
            return effort_of("think", self.think)
        if self.reasoning is None:
            return None
        return effort_of("reasoning.effort", self.reasoning.get("effort"))

    @property
    def thinks(self) -> bool | None:
        """Whether the model shall reason; None: its default. Raises InvalidRequest."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.think, bool):
            return self.think
        if self.thinking is not None:
            return thinking_type("thinking", self.thinking)
        if isinstance(found := (self.reasoning or {}).get("enabled"), bool | None):
            return found
        raise InvalidRequest("reasoning.enabled", "has to be true or false")

    def _template_variables(self) -> dict[str, Any]:
        """In the names of reasoning models' templates; other templates do not read them."""
        self._ignored += ignored_of("reasoning", self.reasoning or {}, _REASONING)
        self._ignored += ignored_of("thinking", self.thinking or {}, ("type",))
        effort, thinks = self.effort, self.thinks
        if effort == "none":
            thinks = False
        switch = {} if thinks is None else {"enable_thinking": thinks}
        return switch | ({} if effort in (None, "none") else {"reasoning_effort": effort})

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """Raises InvalidRequest or HttpError."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def _structured(self) -> Grammatical | None:
        asked, use = self._asked_format(), self.tool_use
        return asked if use is None else of_tools(use, asked)


class ChatRequest(MessageBody):
    unserved: ClassVar[dict[str, tuple[Any, ...]]] = _UNSERVED_CHAT
    max_tokens_by_default: ClassVar[int | None] = None

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    """For OpenAI's own models."""
    # The older form of tools and tool_choice.
    functions: list[Any] | None = None
    function_call: Any = None

    @cached_property
    def tool_use(self) -> ToolUse | None:
        if not self.functions:
            if self.function_call not in (None, "none", "auto"):
                raise InvalidRequest("function_call", "there are no functions")
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.tools:
            raise InvalidRequest("functions", "is the older form of tools; give one of them")
        return function_use(self.functions, self.function_call)

    @property
    def effort(self) -> str | None:
        asked = effort_of("reasoning_effort", self.reasoning_effort)
        return super().effort if asked is None else asked

    @property
    def asked_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens; give one of them")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def field_names(self) -> dict[str, str]:
        names = super().field_names | {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def _num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
            return None
        return self.top_logprobs or 0

    def to_prompts(self) -> list[Prompt]:
        messages = tuple(message(f"messages[{i}]", given) for i, given in enumerate(self.messages))
        variables = self._template_variables() | (self.chat_template_kwargs or {}) or None
        return [ChatPrompt(messages, tools=self.tool_use, variables=variables, reads_reasoning=True)]


Parsed = TypeVar("Parsed", bound=Body)


def parse(kind: type[Parsed], body: bytes, *, ignores: bool = False) -> Parsed:
    """`ignores`: whether unknown fields are ignored. Raises HttpError, naming the field at fault."""
    # As encoders write a field that was not given, of another server too.
    fields = {name: value for name, value in _json_object(body).items() if value is not None}
    _refuse_unserved(fields, kind.unserved)
    ignored = _unknown_fields(fields, kind, ignores=ignores)
    _refuse_unbounded(fields)
    try:
        parsed = kind.model_validate({name: fields[name] for name in fields if name in kind.model_fields})
    except ValidationError as error:
        raise _first(error) from error
    parsed.ignored.extend(ignored)
    return parsed


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        # NaN is allowed here, so that the error can name its field. The parser bounds the depth.
        fields = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise HttpError(400, "the body has to be a JSON object", code="invalid_json")
    return fields


def _refuse_unserved(fields: dict[str, Any], unserved: dict[str, tuple[Any, ...]]) -> None:
    for name, value in fields.items():
        if name in unserved and not any(_same(value, fine) for fine in unserved[name]):
            raise unsupported(name, "is not supported")


def _unknown_fields(fields: dict[str, Any], kind: type[Body], *, ignores: bool) -> list[str]:
    known = (*kind.model_fields, *kind.unserved, *kind.said)
    taken = HARMLESS_NAMES.union(known)
    unknown = [name for name in fields if name not in taken]
    if unknown and not ignores:
        raise _unknown(unknown[0])
    try:
        return [*ignored_of("", unknown, known), *(name for name in kind.said if name in fields)]
    except InvalidRequest as error:
        raise from_outrider(error) from error


def _refuse_unbounded(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, list | dict) and len(value) > _MAX_ENTRIES.get(name, len(value)):
            raise from_outrider(InvalidRequest(name, f"{len(value)} entries; at most {_MAX_ENTRIES[name]} are allowed"))


def _unknown(param: str) -> HttpError:
    return HttpError(400, f"{param}: unknown field", param=param, code="unknown_parameter")


def _same(value: Any, fine: Any) -> bool:
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(fine, bool) and bool(value == fine)


def _first(error: ValidationError) -> HttpError:
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return _unknown(param)
    if fault["type"] == "missing":
        return HttpError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    message = fault["msg"].replace("Input should be", "has to be")
    return HttpError(400, f"{param}: {message}", param=param, code="invalid_type")


def _path(location: tuple[int | str, ...]) -> str:
    """("stop", 3) → stop[3]; ("stream_options", "x") → stream_options.x."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def _prompt(where: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt, where)
    if isinstance(prompt, list) and set(map(type, prompt := _all_whole(prompt))) <= {int}:
        return TokenPrompt(prompt, where)
    raise InvalidRequest(where, "has to be a string or a list of token ids")


def flat_format(where: str, asked: Any) -> Structured | None:
    """A `response_format` whose schema lies beside its type. Raises InvalidRequest."""
    if isinstance(asked, dict) and asked.get("type") == "json_schema":
        asked = {"type": "json_schema", "json_schema": {k: v for k, v in asked.items() if k != "type"}}

    def renamed(field: str | None) -> str:
        return (field or "").replace("response_format.json_schema", where).replace("response_format", where)

    try:
        found = from_response_format(asked)
    except InvalidRequest as error:
        raise InvalidRequest(renamed(error.field), error.message) from error
    return found and replace(found, field=renamed(found.field))


def effort_of(where: str, given: str | None) -> str | None:
    if given is not None and given not in _EFFORTS:
        raise InvalidRequest(where, f"has to be one of {', '.join(_EFFORTS)}")
    return given


def _token_id(where: str, name: str) -> int:
    """JSON has no keys but strings."""
    name = name.removesuffix(".0")
    if not (name.isascii() and name.isdigit() and len(name) <= 10):
        raise InvalidRequest(where, "its keys have to be token ids")
    return int(name)


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(one, str) for one in stop):
        return tuple(stop)
    raise InvalidRequest("stop", "has to be a string or a list of strings")
