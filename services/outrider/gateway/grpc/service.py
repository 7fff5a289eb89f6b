"""The public gRPC API: translates requests for the core, and its answers back."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc

from outrider.errors import InvalidRequest, OutriderError
from outrider.gateway.generation.answers import Choices, Chunk
from outrider.gateway.generation.generation import Generator
from outrider.gateway.generation.logits import LogitsChoice
from outrider.gateway.generation.pacing import FRAME_BYTES, Pacer
from outrider.gateway.generation.requests import (
    MAX_CHOICES,
    MAY_LEAVE_OUT,
    ChatPrompt,
    Generation,
    Options,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_num_messages,
    numbered,
)
from outrider.gateway.generation.stats import AnswerFinish, Summary, Usage
from outrider.gateway.tenants.auth import check_model, default_tenant
from outrider.gateway.tools.structured import Structured, parsed_schema
from outrider.limits import check_token_ids
from outrider.protocol import convert
from outrider.rpc.access.roles import current_caller
from outrider.rpc.channel import remaining_s
from outrider.rpc.link import write_within
from outrider.rpc.v1 import generation_pb2, generation_pb2_grpc, router_pb2, tenants_pb2
from outrider.telemetry.context import TraceContext

SERVICE = "outrider.rpc.v1.GenerationService"
DEFAULT_MAX_TOKENS = 256
MAX_DETOKENIZED = 65_536
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_STRUCTURED = "structured"
_OPTIONS = frozenset(field.name for field in generation_pb2.GenerationOptions.DESCRIPTOR.fields)


def sharing(context: Context) -> str:
    """The caller's name in what callers share."""
    return current_caller().sharing(context.peer().rpartition(":")[0])


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, core: Generator, send_timeout_s: float) -> None:
        self._core = core
        self._send_timeout_s = send_timeout_s

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        async with self._start(request, "", context) as choices:
            chunks = [list[Chunk]() for _ in choices.answers]
            async with aclosing(choices.chunks()) as numbered:
                async for number, chunk in numbered:
                    chunks[number].append(chunk)
                    choices.kept.add(sum(each.ByteSize() for each in (*chunk.logprobs, *chunk.prompt_logprobs)))
        first, *others = (Chunk.join(of_one) for of_one in chunks)
        response = generation_pb2.GenerateResponse(
            id=choices.id,
            model=choices.model,
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            prompt_logprobs=first.prompt_logprobs,
            others=[_choice(other) for other in others],
        )
        if first.finish:
            _finish(response, first.finish, choices.answers[0].options.include_metrics and not others)
        _set_usage(response.usage, choices.usage)
        return response

    async def StreamGenerate(  # type: ignore[override]
        self, request: generation_pb2.StreamGenerateRequest, context: Context
    ) -> None:
        tenant = current_caller().tenant
        async with self._start(request.request, "request.", context) as choices:
            if tenant is not None and tenant.pacing == tenants_pb2.PACING_CONSTANT:
                await self._paced(choices, context)
                return
            async with aclosing(choices.chunks()) as numbered:
                async for number, chunk in numbered:
                    await write_within(context, _response(choices, number, chunk), self._send_timeout_s)

    async def _paced(self, choices: Choices, context: Context) -> None:
        unsent: list[tuple[int, Chunk]] = []

        async def send() -> None:
            await write_within(context, _frame(choices, unsent), self._send_timeout_s)

        pacer, failed = Pacer(self._core.beat.s, send), None
        async with pacer.beating():
            try:
                async with aclosing(choices.chunks()) as numbered:
                    async for numbered_chunk in numbered:
                        pacer.check()
                        unsent.append(numbered_chunk)
            except OutriderError as error:
                # Sent after the tokens before it.
                failed = error
        while unsent:
            await pacer.beat()
        if failed is not None:
            raise failed

    async def GetReceiptKey(
        self, request: generation_pb2.GetReceiptKeyRequest, context: Context
    ) -> generation_pb2.GetReceiptKeyResponse:
        return generation_pb2.GetReceiptKeyResponse(pem=self._core.receipt_key.public_pem)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        if len(request.token_ids) > MAX_DETOKENIZED:
            raise InvalidRequest("token_ids", f"{len(request.token_ids)}; at most {MAX_DETOKENIZED} are allowed")
        tenant = current_caller().tenant or default_tenant()
        check_model(tenant, request.model)
        async with self._core.reading(tenant, len(request.token_ids), sharing(context)) as charge:
            charge.worked = len(request.token_ids)
            model = await self._core.catalog.get(request.model)
            check_token_ids("token_ids", request.token_ids, model.vocab_size)
            table = model.tokenizer.marked_bytes if request.chat else model.tokenizer.token_bytes
            tokens = await self._core.threads.of(tenant.name).run(
                len(request.token_ids), lambda: [table.of(token_id) for token_id in request.token_ids]
            )
            charge.ended(len(tokens), 0)
        return generation_pb2.DetokenizeResponse(tokens=tokens)

    @asynccontextmanager
    async def _start(
        self, request: generation_pb2.GenerateRequest, where: str, context: Context
    ) -> AsyncIterator[Choices]:
        """`where` is the path of the request in the received message, for the field names in errors."""
        with _field_paths(where):
            async with self._core.start(
                [to_generations(request)],
                default_max_tokens=DEFAULT_MAX_TOKENS,
                timeout_s=remaining_s(context),
                trace_context=TraceContext.of(context.invocation_metadata()),
                tenant=current_caller().tenant,
                sharing=sharing(context),
            ) as answers:
                with self._core.admission.keeping(sharing(context)) as kept:
                    yield Choices(answers, num_prompts=1, kept=kept)


@contextmanager
def _field_paths(where: str) -> Iterator[None]:
    """Turns the field names in errors into paths in the message: those of options are below `options`."""
    try:
        yield
    except OutriderError as error:
        if name := error.field:
            parent = "options." if re.split(r"[.\[]", name)[0] in _OPTIONS else ""
            error.field = f"{where}{parent}{name}"
        raise


def _frame(choices: Choices, unsent: list[tuple[int, Chunk]]) -> generation_pb2.StreamGenerateResponse:
    """Takes the chunks of the answer that comes first, and fills the message up. Their accepted tokens are not counted:
    they do not come first in it.
    """
    if not unsent:
        return padded(generation_pb2.StreamGenerateResponse(id=choices.id, model=choices.model))
    first = unsent[0][0]
    message = _response(choices, first, Chunk.join([chunk for number, chunk in unsent if number == first]))
    unsent[:] = [each for each in unsent if each[0] != first]
    message.num_accepted = 0
    return padded(message)


def padded(message: generation_pb2.StreamGenerateResponse) -> generation_pb2.StreamGenerateResponse:
    """The message, with `padding` up to a multiple of FRAME_BYTES."""
    # At least so much that its length takes two bytes, however much is added.
    message.padding = bytes(128)
    message.padding += bytes(-message.ByteSize() % FRAME_BYTES)
    return message


def _response(choices: Choices, number: int, chunk: Chunk) -> generation_pb2.StreamGenerateResponse:
    response = generation_pb2.StreamGenerateResponse(
        id=choices.id,
        model=choices.model,
        text=chunk.text,
        token_ids=chunk.token_ids,
        num_accepted=chunk.num_accepted,
        index=number,
        logprobs=chunk.logprobs,
        prompt_logprobs=chunk.prompt_logprobs,
    )
    if chunk.finish:
        _finish(response, chunk.finish, choices.answers[number].options.include_metrics)
    return response


def _choice(answer: Chunk) -> generation_pb2.Choice:
    reason = answer.finish.reason if answer.finish else ""
    return generation_pb2.Choice(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=reason,
        logprobs=answer.logprobs,
        receipt=answer.finish.receipt if answer.finish else "",
    )


def _finish(
    response: generation_pb2.GenerateResponse | generation_pb2.StreamGenerateResponse,
    finish: AnswerFinish,
    include_metrics: bool,
) -> None:
    response.finish_reason, response.receipt = finish.reason, finish.receipt
    _set_usage(response.usage, finish.usage)
    if include_metrics:
        response.metrics.CopyFrom(to_metrics(finish.summary))


def _set_usage(usage: generation_pb2.Usage, counts: Usage) -> None:
    usage.prompt_tokens = counts.prompt_tokens
    usage.completion_tokens = counts.completion_tokens
    usage.cached_tokens = counts.cached_tokens
    usage.accepted_prediction_tokens = counts.accepted_prediction_tokens
    usage.rejected_prediction_tokens = counts.rejected_prediction_tokens


def to_metrics(summary: Summary) -> generation_pb2.Metrics:
    return generation_pb2.Metrics(
        time_to_first_token_ms=summary.time_to_first_token_ms,
        generation_time_ms=summary.generation_time_ms,
        queue_time_ms=summary.queue_time_ms,
        mean_itl_ms=summary.mean_itl_ms,
        tokens_per_second=summary.tokens_per_second,
        speculative_decoding=summary.sums.to_proto(),
    )


def to_generations(request: generation_pb2.GenerateRequest) -> list[Generation]:
    """Returns one for each answer. Raises InvalidRequest."""
    if not request.model:
        raise InvalidRequest("model", "is missing")
    asked = request.options
    count = asked.n if asked.HasField("n") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequest("n", f"{count} is not allowed; it has to be from 1 to {MAX_CHOICES}")
    if count > 1 and request.resume_token_ids:
        raise InvalidRequest("resume_token_ids", "continues one answer, so it cannot be combined with n")
    prompt = _prompt(request)
    return [
        Generation(request.model, prompt, options, asked.prediction, request.resume_token_ids, request.resume_revision)
        for options in numbered(_options(asked), count)
    ]


def _prompt(request: generation_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text, "text")
        case "chat":
            check_num_messages("chat.messages", len(request.chat.messages))
            messages = tuple({"role": m.role, "content": m.content} for m in request.chat.messages)
            for i, message in enumerate(messages):
                if message["role"] == "tool":
                    raise InvalidRequest(f"chat.messages[{i}].role", "'tool' is for the HTTP API, which has tools")
            return ChatPrompt(messages, "chat.messages")
        case "tokens":
            return TokenPrompt(request.tokens.token_ids, "tokens.token_ids")
        case _:
            raise InvalidRequest("prompt", "is missing: one of text, chat and tokens")


def _options(options: generation_pb2.GenerationOptions) -> Options:
    if options.prompt_logprobs and not options.HasField("logprobs"):
        raise InvalidRequest("prompt_logprobs", "is only allowed with logprobs")
    if options.speculation not in router_pb2.SpeculationMode.values():
        raise InvalidRequest("speculation", f"{options.speculation} is not a known mode")
    return Options(
        temperature=options.temperature if options.HasField("temperature") else 1.0,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed if options.HasField("seed") else None,
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        speculation=options.speculation or router_pb2.SPECULATION_MODE_AUTO,
        max_draft_tokens=options.max_draft_tokens if options.HasField("max_draft_tokens") else None,
        include_metrics=options.include_metrics,
        ignore_eos=options.ignore_eos,
        logits=_logits(options),
        logprobs=options.logprobs if options.HasField("logprobs") else None,
        echo=options.prompt_logprobs,
        receipt=options.receipt,
        left_out=_left_out(options),
    )


def _left_out(options: generation_pb2.GenerationOptions) -> frozenset[str]:
    # `logits` are whole: they leave nothing out.
    stated = {field.name for field, _ in options.ListFields()}
    return frozenset(MAY_LEAVE_OUT) - stated - ({"repetition_penalty"} if "logits" in stated else set())


def _logits(options: generation_pb2.GenerationOptions) -> LogitsChoice:
    named = LogitsChoice(
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty if options.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(options.logit_bias.items()),
        allowed_token_ids=tuple(options.allowed_token_ids),
        words=tuple(options.bad_words),
        min_tokens=options.min_tokens,
        structured=_structured(options.structured) if options.HasField("structured") else None,
    )
    if not options.HasField("logits"):
        return named
    if named:
        raise InvalidRequest("logits", "cannot be combined with other options that change logits")
    return LogitsChoice(**asdict(convert.logits_from_proto(options.logits)), exact=True)


def _structured(asked: generation_pb2.StructuredOutput) -> Structured:
    match asked.WhichOneof("kind"):
        case "json_schema":
            return Structured(
                "json_schema", parsed_schema(asked.json_schema, f"{_STRUCTURED}.json_schema"), _STRUCTURED
            )
        case "regex":
            return Structured("regex", asked.regex, f"{_STRUCTURED}.regex")
        case "choice":
            return Structured("choice", list(asked.choice.texts), f"{_STRUCTURED}.choice.texts")
        case "grammar":
            return Structured("grammar", asked.grammar, f"{_STRUCTURED}.grammar")
        case _:
            raise InvalidRequest(_STRUCTURED, "has to have one of json_schema, regex, choice and grammar")
