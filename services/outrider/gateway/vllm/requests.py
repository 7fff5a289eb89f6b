"""Converts requests of vLLM's engine service. An option that is not served exactly is refused by name. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2 as vllm

from outrider.errors import InvalidRequest, NotSupported, OutriderError
from outrider.gateway.generation.logits import LogitsChoice
from outrider.gateway.generation.requests import (
    MAX_CHOICES,
    Generation,
    Options,
    Prompt,
    TextPrompt,
    TokenPrompt,
    numbered,
)
from outrider.gateway.tools.structured import Structured, parsed_schema

_PARAMS = "sampling_params"
_PARAM_NAMES = frozenset(field.name for field in vllm.SamplingParams.DESCRIPTOR.fields)
_REFUSED = {
    "kv_transfer_params": "no KV cache is handed over",
    "kv_transfer_params_json": "no KV cache is handed over",
    "mm_inputs": "only text is read",
    "extra_mm_inputs": "only text is read",
    "media_refs": "only text is read",
}
_ANY_SEED = -1
"""vLLM's other value for no seed."""


@dataclass(frozen=True, slots=True)
class LogprobsAsked:
    """Likeliest tokens to return at each position, in addition to the chosen one; None: no log probabilities."""

    output: int | None
    prompt: int | None

    @property
    def most(self) -> int | None:
        return max((count for count in (self.output, self.prompt) if count is not None), default=None)


def to_generations(request: vllm.GenerateRequest, model: str) -> list[Generation]:
    """Returns one for each answer. Raises InvalidRequest or NotSupported; see `field_paths`."""
    for field, _ in request.ListFields():
        if field.name in _REFUSED:
            raise NotSupported(field.name, _REFUSED[field.name])
    if request.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", f"{request.data_parallel_rank}: the only rank is 0")
    params = request.sampling_params
    count = params.n or 1
    if count > MAX_CHOICES:
        raise InvalidRequest("n", f"{count} is not allowed; at most {MAX_CHOICES} are")
    prompt = _prompt(request)
    return [Generation(model, prompt, options) for options in numbered(_options(params), count)]


@contextmanager
def field_paths() -> Iterator[None]:
    """Turns the field names in errors into paths in the message: sampling options are below `sampling_params`."""
    try:
        yield
    except OutriderError as error:
        if error.field and re.split(r"[.\[]", error.field)[0] in _PARAM_NAMES:
            error.field = f"{_PARAMS}.{error.field}"
        raise


def logprobs_asked(params: vllm.SamplingParams) -> LogprobsAsked:
    """Raises InvalidRequest for a request for the whole vocabulary."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) < 0:
            raise InvalidRequest(name, f"{getattr(params, name)} is not allowed; it has to be at least 0")
    return LogprobsAsked(
        params.logprobs if params.HasField("logprobs") else None,
        params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def _prompt(request: vllm.GenerateRequest) -> Prompt:
    params = request.sampling_params
    kept = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    if kept is not None and kept < 1:
        raise InvalidRequest("truncate_prompt_tokens", f"{kept} is not allowed; it has to be at least 1")
    match request.WhichOneof("input"):
        case "tokenized":
            ids = request.tokenized.input_ids
            return TokenPrompt(ids if kept is None else ids[-kept:], "tokenized.input_ids")
        case "text":
            if kept is not None:
                raise NotSupported("truncate_prompt_tokens", "only of a prompt that comes as tokens")
            return TextPrompt(request.text, "text")
        case _:
            raise InvalidRequest("input", "is missing: one of tokenized and text")


def _options(params: vllm.SamplingParams) -> Options:
    """As in vLLM's own server, 0 means the default for options that cannot be 0."""
    if params.stop and not params.skip_special_tokens:
        raise InvalidRequest("skip_special_tokens", "has to be true with stop, which is looked for in text alone")
    asked = logprobs_asked(params)
    seed = params.seed if params.HasField("seed") and params.seed != _ANY_SEED else None
    return Options(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        seed=None if seed is None else seed % 2**64,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logits=LogitsChoice(
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty or 1.0,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            structured=_structured(params),
        ),
        logprobs=asked.most,
        echo=asked.prompt is not None,
    )


def _structured(params: vllm.SamplingParams) -> Structured | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return Structured("json_schema", parsed_schema(params.json_schema, "json_schema"), "json_schema")
        case "json_object":
            if not params.json_object:
                raise InvalidRequest("json_object", "has to be true")
            return Structured("json_schema", {"type": "object"}, "json_object")
        case "regex":
            return Structured("regex", params.regex, "regex")
        case "grammar":
            return Structured("grammar", params.grammar, "grammar")
        case "choice":
            choices: Sequence[str] = params.choice.choices
            return Structured("choice", list(choices), "choice.choices")
        case other:
            raise NotSupported(str(other), "one of json_schema, json_object, regex, grammar and choice is")
