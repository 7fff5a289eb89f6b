"""The path of every request, from any of the APIs: admit, tokenise, route, detokenise, end.

A request survives the loss of its router. The gateway sends the tokens already delivered to another router, which
continues the same answer; the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from outrider.errors import Code, DeadlineExceeded, InternalError, InvalidRequest, OutriderError, Unavailable
from outrider.gateway.config import Failover
from outrider.gateway.generation.context_length import check_room, max_new_tokens, too_long
from outrider.gateway.generation.metrics import GatewayMetrics, RequestObserver
from outrider.gateway.generation.output import FinishReason, Output, Piece, parser_of
from outrider.gateway.generation.pacing import Beat
from outrider.gateway.generation.requests import (
    ChatPrompt,
    Generation,
    Options,
    Prompt,
    SpeculationChoice,
    TextPrompt,
    TokenPrompt,
)
from outrider.gateway.generation.retry import RouterRetry
from outrider.gateway.generation.spans import RequestSpan, request_span
from outrider.gateway.generation.stats import AnswerFinish, RunningStats, Usage
from outrider.gateway.routers.routers import RouterPool
from outrider.gateway.tenants.admission import Admission
from outrider.gateway.tenants.auth import check_model, default_tenant
from outrider.gateway.tenants.quota_keeper import Charge, QuotaKeeper
from outrider.gateway.tenants.quotas import prompt_tokens_of
from outrider.gateway.tokenizer.catalog import Catalog, Model
from outrider.gateway.tokenizer.model import CannotSplit, ModelTokenizer, TooManyTokens
from outrider.gateway.tokenizer.template import TemplateError
from outrider.gateway.tokenizer.threads import TenantThreads, TokenizerThreads
from outrider.gateway.tools.parsers.reasoning import Thought
from outrider.gateway.tools.parsers.tool_calls import Delta
from outrider.limits import check_token_ids
from outrider.options.logprobs import MAX_PROMPT_LOGPROBS, LogprobsOptions
from outrider.options.prediction import Prediction
from outrider.protocol import logprobs
from outrider.protocol.receipts import ReceiptKey, receipt_of
from outrider.rpc.v1 import router_pb2, sequence_pb2, tenants_pb2
from outrider.telemetry.context import NO_CONTEXT, TraceContext
from outrider.telemetry.tracing import Tracing
from outrider.token_bytes import TokenBytes

log = logging.getLogger(__name__)
_TOO_LATE = "the deadline passed before the answer was complete"
_SPECULATION = {
    SpeculationChoice.AUTO: router_pb2.SPECULATION_MODE_AUTO,
    SpeculationChoice.ON: router_pb2.SPECULATION_MODE_ON,
    SpeculationChoice.OFF: router_pb2.SPECULATION_MODE_OFF,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round adds to the answer."""

    delta: Delta
    token_ids: tuple[int, ...]
    num_accepted: int
    """The first `num_accepted` of `token_ids` were drafted."""
    finish: AnswerFinish | None = None
    logprobs: Sequence[sequence_pb2.TokenLogprobs] = ()
    """One per token, if requested."""
    prompt_logprobs: Sequence[sequence_pb2.TokenLogprobs] = ()
    """With the first chunk, if requested: one per token of the prompt except the first."""

    @property
    def text(self) -> str:
        return self.delta.content

    @property
    def receipt(self) -> str:
        """At the end, if requested; else empty."""
        return self.finish.receipt if self.finish else ""

    @classmethod
    def join(cls, chunks: Sequence[Chunk]) -> Chunk:
        return cls(
            Delta.join(chunk.delta for chunk in chunks),
            tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            sum(chunk.num_accepted for chunk in chunks),
            chunks[-1].finish,
            [each for chunk in chunks for each in chunk.logprobs],
            chunks[0].prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an admitted, valid request. `chunks` yields its tokens; the last chunk has `finish`."""

    id: str
    model: str
    options: Options
    chunks: AsyncIterator[Chunk]
    prompt_token_ids: Sequence[int]
    prompt: Prompt
    tokenizer: ModelTokenizer


@dataclass(slots=True)
class _Job:
    request: router_pb2.RouteRequest
    model: Model
    generation: Generation
    tenant: tenants_pb2.Tenant
    output: Output
    stats: RunningStats
    deadline_s: float
    """On the monotonic clock."""
    span: RequestSpan
    prediction: Prediction
    receipt_key: ReceiptKey

    @classmethod
    def of(
        cls,
        shared: router_pb2.RouteRequest,
        model: Model,
        generation: Generation,
        tenant: tenants_pb2.Tenant,
        span: RequestSpan,
        receipt_key: ReceiptKey,
        *,
        started_s: float,
        deadline_s: float,
        pays_prompt: bool,
    ) -> _Job:
        """`shared`: what all answers to its prompt ask for, as `_prepare` has it. `pays_prompt`: whether the prompt is
        charged and billed with this answer, and not with another one to it."""
        tokenizer, options, prompt = model.tokenizer, generation.options, shared.prompt_token_ids
        eos = () if options.ignore_eos else tokenizer.eos_token_ids
        output = Output(
            token_bytes=_token_bytes(tokenizer, generation.prompt),
            stop=options.stop,
            stop_token_ids=frozenset({*options.stop_token_ids, *eos}),
            max_tokens=shared.stopping.max_new_tokens,
            min_tokens=options.logits.min_tokens,
            parser=parser_of(generation.prompt, tokenizer, prompt, options.logits.structured),
        )
        request = router_pb2.RouteRequest(
            request_id=uuid.uuid4().hex,
            resume_revision=generation.resume_revision,
            sampling=sequence_pb2.Sampling(
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                seed=options.seed or 0,
            ),
            seeded=options.seed is not None,
            stopping=sequence_pb2.Stopping(stop_token_ids=sorted(output.stop_token_ids)),
            speculation=_SPECULATION[options.speculation],
            max_draft_tokens=options.max_draft_tokens,
            traceparent=span.context.traceparent,
            tracestate=span.context.tracestate,
            # What the client resumes with is run like a prompt.
            billed_prompt_tokens=(len(prompt) if pays_prompt else 0) + len(generation.resume_token_ids),
            num_resumed_by_client=len(generation.resume_token_ids),
        )
        request.MergeFrom(shared)
        prediction = Prediction(shared.predicted_token_ids)
        prediction.extend(generation.resume_token_ids)
        stats = RunningStats(started_s)
        return cls(request, model, generation, tenant, output, stats, deadline_s, span, prediction, receipt_key)

    @property
    def usage(self) -> Usage:
        predicted, cached = self.prediction, self.stats.sums.num_cached_tokens
        counts = predicted.num_accepted, predicted.num_rejected
        return Usage(len(self.request.prompt_token_ids), len(self.output.token_ids), cached, *counts)

    def route_request(self) -> router_pb2.RouteRequest:
        """The router's request for the rest of the answer: all of it, or what is left after a router was lost."""
        self.request.resume_token_ids[:] = self.output.token_ids
        if self.stats.revisions:
            self.request.resume_revision = self.stats.revisions[-1][0]
        return self.request

    def take(self, response: router_pb2.RouteResponse, now_s: float) -> Chunk:
        """Adds one round's tokens, up to the end of the answer."""
        self.stats.generated_by(response.model_revision, len(self.output.token_ids))
        self.stats.add_round(response)
        piece = self.output.push(response.token_ids)
        if piece.finish_reason is None and response.finish_reason != sequence_pb2.FINISH_REASON_UNSPECIFIED:
            piece = self._ended_by_router(piece, response.finish_reason)
        self.prediction.extend(piece.token_ids)
        self.stats.add_tokens(len(piece.token_ids), now_s)
        if self.generation.options.asked_logprobs and len(response.logprobs) != len(response.token_ids):
            given = len(response.logprobs), len(response.token_ids)
            about = {"request_id": self.request.request_id, "tenant": self.tenant.name}
            log.error("the router gave %d log probabilities for %d tokens", *given, extra=about)
            raise InternalError("the router gave too few log probabilities")
        found = response.logprobs[: len(piece.token_ids)]
        return self.chunk(piece, response.num_accepted, now_s, found, response.prompt_logprobs)

    def chunk(
        self,
        piece: Piece,
        num_accepted: int,
        now_s: float,
        found: Sequence[sequence_pb2.TokenLogprobs] = (),
        of_prompt: Sequence[sequence_pb2.TokenLogprobs] = (),
    ) -> Chunk:
        finish = None
        if piece.finish_reason is not None:
            summary = self.stats.summary(now_s)
            finish = AnswerFinish(piece.finish_reason, self.usage, summary, self.output.matched_stop, self._receipt())
        num_accepted = min(num_accepted, len(piece.token_ids))
        return Chunk(piece.delta, piece.token_ids, num_accepted, finish, found, of_prompt)

    def _receipt(self) -> str:
        options = self.generation.options
        if not options.receipt:
            return ""
        receipt = receipt_of(self.route_request(), options.stop, self.stats.revisions, list(self.stats.draft_kinds))
        return self.receipt_key.sign(receipt)

    def _ended_by_router(self, piece: Piece, reason: sequence_pb2.FinishReason.ValueType) -> Piece:
        if reason not in (sequence_pb2.FINISH_REASON_STOP, sequence_pb2.FINISH_REASON_LENGTH):
            raise InternalError(f"the router ended the request with finish reason {reason}")
        ours: FinishReason = "stop" if reason == sequence_pb2.FINISH_REASON_STOP else "length"
        return self.output.end(ours, piece)


@dataclass(slots=True)
class Generator:
    """Answers requests: see `start`. Everything that a request holds is released when its block is left."""

    catalog: Catalog
    routers: RouterPool
    admission: Admission
    metrics: GatewayMetrics
    failover: Failover
    request_timeout_s: float
    clock: Callable[[], float] = field(default=time.monotonic)
    tracing: Tracing | None = None
    quotas: QuotaKeeper = field(default_factory=QuotaKeeper)
    threads: TokenizerThreads = field(default_factory=TokenizerThreads)
    receipt_key: ReceiptKey = field(default_factory=ReceiptKey.make)
    beat: Beat = field(default_factory=Beat)

    @property
    def problem(self) -> str:
        """Why the gateway cannot take requests now; empty if it can. Thread-safe."""
        if self.admission.leaving or self.admission.draining:
            return "draining"
        return "" if self.catalog.ready or self.catalog.awaited else "no model is ready"

    @asynccontextmanager
    async def start(
        self,
        prompts: Sequence[Sequence[Generation]],
        *,
        default_max_tokens: int | None,
        timeout_s: float | None = None,
        trace_context: TraceContext = NO_CONTEXT,
        tenant: tenants_pb2.Tenant | None = None,
        sharing: str = "",
    ) -> AsyncIterator[list[Answer]]:
        """Yields the running answers, in the order of the prompts, with the same number for each; each counts as a
        request. The answers to one prompt may differ only in their seeds, those of different prompts also in the
        prompt.

        `default_max_tokens` None means as many as the context holds, `tenant` None the default one; `sharing`: who has
        the places. Raises OutriderError for every error known before the first token; later errors come from `chunks`.
        """
        started_s = self.clock()
        tenant = tenant or default_tenant()
        if tenant.receipts or prompts[0][0].options.receipt:
            prompts = [[generation.with_receipt() for generation in of_prompt] for of_prompt in prompts]
        generations = [generation for of_prompt in prompts for generation in of_prompt]
        check_model(tenant, generations[0].model)
        self._check_places(tenant, prompts)
        patience_s = min(self.request_timeout_s, timeout_s if timeout_s is not None else self.request_timeout_s)
        async with AsyncExitStack() as stack:
            spans = [stack.enter_context(request_span(self.tracing, each, trace_context)) for each in generations]
            observers = [stack.enter_context(self.metrics.request(started_s)) for _ in generations]
            prompt_tokens = sum(_prompt_tokens(of_prompt[0]) for of_prompt in prompts)
            max_tokens = generations[0].options.max_tokens
            charge = await stack.enter_async_context(
                self.quotas.held(tenant, prompt_tokens, max_tokens, len(generations))
            )
            # After the quota, which may wait: who is over it has no places meanwhile.
            stack.enter_context(self.admission.enter(sharing, tenant.weight or 1.0, len(generations)))
            try:
                async with asyncio.timeout(patience_s):
                    model = await self.catalog.get(generations[0].model)
                    charge.worked = prompt_tokens
                    prompts = [[each.for_model(model.tokenizer) for each in of_prompt] for of_prompt in prompts]
                    ready = await self._prepare(model, prompts, default_max_tokens, self.threads.of(tenant.name))
            except TimeoutError as error:
                raise DeadlineExceeded(_TOO_LATE) from error
            read = sum(len(each.prompt_token_ids) for each in ready)
            charge.take(read + sum(len(each[0].resume_token_ids) for each in prompts) - prompt_tokens)
            answers, watches = [], zip(spans, observers, strict=True)
            times = {"started_s": started_s, "deadline_s": started_s + patience_s}
            about = router_pb2.RouteRequest(
                tenant=tenant.name,
                weight=tenant.weight,
                expected_tokens=max(1, round(charge.expected_tokens)),
                samples=tenant.samples,
                consent_unix_us=tenant.read_unix_us,
            )
            for shared, of_prompt in zip(ready, prompts, strict=True):
                shared.MergeFrom(about)
                for number, generation in enumerate(of_prompt):
                    span, observer = next(watches)
                    first = not number
                    job = _Job.of(shared, model, generation, tenant, span, self.receipt_key, pays_prompt=first, **times)
                    answers.append(await stack.enter_async_context(self._answering(job, observer, charge)))
            yield answers

    @asynccontextmanager
    async def reading(self, tenant: tenants_pb2.Tenant, num_tokens: float, sharing: str) -> AsyncIterator[Charge]:
        """Admits a request that only tokenises or detokenises: it takes a place, and is charged for its tokens, about
        `num_tokens`. The block has to tell the charge how many they were. Raises Overloaded or Unavailable.
        """
        async with self.quotas.held(tenant, num_tokens, 0) as charge:
            with self.admission.enter(sharing, tenant.weight or 1.0):
                yield charge

    def _check_places(self, tenant: tenants_pb2.Tenant, prompts: Sequence[Sequence[Generation]]) -> None:
        """Raises InvalidRequest for more answers than may ever run at once, as no retry could succeed."""
        num_answers = sum(map(len, prompts))
        most = min(tenant.quota.concurrent_requests or self.admission.max_running, self.admission.max_running)
        if num_answers > most:
            field = "n" if len(prompts[0]) > most else "prompt"
            raise InvalidRequest(field, f"{num_answers} answers in one request; at most {most} may run at once")

    @asynccontextmanager
    async def _answering(self, job: _Job, observer: RequestObserver, charge: Charge) -> AsyncIterator[Answer]:
        request, generation = job.request, job.generation
        observer.prepared(request.model, len(request.prompt_token_ids))
        job.span.prepared(request.request_id, len(request.prompt_token_ids))
        try:
            async with aclosing(self._charged(self._run(job, observer), charge)) as chunks:
                yield Answer(
                    request.request_id,
                    request.model,
                    generation.options,
                    chunks,
                    request.prompt_token_ids,
                    generation.prompt,
                    job.model.tokenizer,
                )
        finally:
            charge.ended(request.billed_prompt_tokens, len(job.output.token_ids) - len(generation.resume_token_ids))

    async def _charged(self, chunks: AsyncGenerator[Chunk, None], charge: Charge) -> AsyncGenerator[Chunk, None]:
        """Takes the tokens of an answer that gets longer than expected as they come."""
        left = charge.expected_tokens
        async with aclosing(chunks):
            async for chunk in chunks:
                left -= len(chunk.token_ids)
                if left < 0:
                    charge.take(-left)
                    left = 0
                yield chunk

    async def _prepare(
        self,
        model: Model,
        prompts: Sequence[Sequence[Generation]],
        default_max_tokens: int | None,
        threads: TenantThreads,
    ) -> list[router_pb2.RouteRequest]:
        """For each prompt, what all answers to it ask for."""
        first = prompts[0][0]
        options = first.options
        check_token_ids("stop_token_ids", options.stop_token_ids, model.vocab_size)
        _check_tools(model, first.prompt)
        if len(first.resume_token_ids) > model.max_context_len:
            message = f"{len(first.resume_token_ids)} tokens exceed the model's context of {model.max_context_len}"
            raise InvalidRequest("resume_token_ids", message)
        check_token_ids("resume_token_ids", first.resume_token_ids, model.vocab_size)
        read = [await self._read(model, of_prompt[0], default_max_tokens, threads) for of_prompt in prompts]
        logits = await self._logits(model, first, read[0][0], threads) if options.logits else None
        predicted, asked = await _predicted(model, first.prediction, threads), options.asked_logprobs
        return [
            router_pb2.RouteRequest(
                model=model.name,
                prompt_token_ids=token_ids,
                stopping=sequence_pb2.Stopping(max_new_tokens=max_tokens),
                logits=logits,
                logprobs=None if asked is None else logprobs.options_to_proto(asked),
                predicted_token_ids=predicted,
            )
            for token_ids, max_tokens in read
        ]

    async def _read(
        self, model: Model, generation: Generation, default_max_tokens: int | None, threads: TenantThreads
    ) -> tuple[list[int], int]:
        """The prompt's token ids, and the most output tokens that may follow them."""
        token_ids, options = await _tokenise(model, generation, threads), generation.options
        if (asked := options.asked_logprobs) is not None:
            where = "logprobs" if options.prompt_logprobs is None else "prompt_logprobs"
            _check_prompt_logprobs(where, asked, len(token_ids))
        return token_ids, max_new_tokens(model, len(token_ids), generation, default_max_tokens)

    async def _logits(
        self, model: Model, generation: Generation, prompt: Sequence[int], threads: TenantThreads
    ) -> sequence_pb2.LogitsOptions | None:
        choice, chat = generation.options.logits, generation.prompt
        reasons = isinstance(chat, ChatPrompt) and chat.reads_reasoning
        thought = model.tokenizer.thought_after(prompt) if reasons else Thought.NONE
        grammar = ""
        if choice.structured is not None:
            grammar = await threads.grammars.make(choice.structured, model.tokenizer, thought, threads.tenant)
        work = lambda: choice.to_proto(model.tokenizer, model.vocab_size, grammar)  # noqa: E731
        return await threads.run(choice.num_chars, work)

    async def _run(self, job: _Job, observer: RequestObserver) -> AsyncGenerator[Chunk, None]:
        piece = job.output.resume(job.generation.resume_token_ids)
        if piece.finish_reason is not None:
            chunk = job.chunk(piece, 0, self.clock())
            observer.chunk(len(piece.token_ids), chunk.finish, self.clock())
            yield chunk
            return
        job.stats.submitted_s = self.clock()
        async with aclosing(self._rounds(job)) as rounds:
            async for response in rounds:
                if response.phase == router_pb2.ROUTE_PHASE_OPENED:
                    job.stats.opened(self.clock())
                    observer.opened()
                chunk = job.take(response, self.clock())
                observer.chunk(len(chunk.token_ids), chunk.finish, self.clock())
                if chunk.finish:
                    job.span.finished(job.model.name, chunk.finish)
                    self.beat.answered(chunk.finish.summary.mean_itl_ms / 1e3)
                if chunk.token_ids or chunk.finish:
                    yield chunk
                if chunk.finish:
                    # Leaving the block cancels the call, which also stops the router at our stop strings.
                    return

    async def _rounds(self, job: _Job) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """Every round of the request. Changes the router when one is lost."""
        retry = RouterRetry(self.failover)
        while True:
            try:
                async with aclosing(self._attempt(job, retry)) as rounds:
                    async for response in rounds:
                        if response.token_ids or response.phase == router_pb2.ROUTE_PHASE_ACCEPTED:
                            retry.got_on()
                        yield response
                return
            except _RouterLost as lost:
                pause_s = retry.pause_s(self.clock())
                if pause_s is None:
                    message = f"{retry.num_breaks} calls to routers broke off; the last: {lost}"
                    raise Unavailable(message, reason="ROUTERS_FAILED", retry_after_s=1.0) from lost
            about = {"request_id": job.request.request_id, "tenant": job.tenant.name, "breaks": retry.num_breaks}
            log.warning("call to a router broke off", extra=about)
            self.metrics.failover(resumed=bool(job.output.token_ids))
            job.stats.num_router_failovers += 1
            await asyncio.sleep(min(pause_s, max(0.0, job.deadline_s - self.clock())))

    async def _attempt(self, job: _Job, retry: RouterRetry) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """One call to one router. Raises _RouterLost if another router may succeed, OutriderError otherwise."""
        remaining_s = job.deadline_s - self.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded(_TOO_LATE)
        try:
            router = await self.routers.pick(job.tenant.name)
        except Unavailable as none_known:
            raise _RouterLost(str(none_known)) from none_known
        try:
            async with aclosing(router.stream.route(job.route_request(), remaining_s)) as rounds:
                async for response in rounds:
                    self.routers.answered(router)
                    yield response
        except OutriderError as error:
            if error.code is Code.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(_TOO_LATE) from error
            if not retry.goes_on(error, has_tokens=bool(job.output.token_ids)):
                error.field = job.generation.options.logits.client_field(error.field)
                raise
            self.routers.failed(router)
            raise _RouterLost(str(error)) from error


class _RouterLost(Exception):
    """A call to a router broke off, and another router may succeed."""


async def _tokenise(model: Model, generation: Generation, threads: TenantThreads) -> list[int]:
    """The prompt's token ids. Raises InvalidRequest for a prompt that is too long, as soon as that is certain."""
    tokenizer, room = model.tokenizer, model.max_context_len - 1
    where = generation.prompt.field
    try:
        match generation.prompt:
            case TokenPrompt(token_ids):
                check_room(model, where, len(token_ids))
                check_token_ids(where, token_ids, model.vocab_size)
                return list(token_ids)
            case TextPrompt(text):
                # Checked here too, and not only in the thread, so that a refusal need not wait for its turn.
                tokenizer.check_len(text, room)
                ids = await threads.run(len(text), lambda: tokenizer.encode(text, room))
            case ChatPrompt(messages, tools=use, variables=variables):
                tools = () if use is None else use.definitions
                text = await threads.rendered(tokenizer.rendering, messages, tools, variables)
                tokenizer.check_len(text, room)
                ids = await threads.run(len(text), lambda: tokenizer.encode_plain(text, room))
    except (TemplateError, CannotSplit) as error:
        raise InvalidRequest(where, str(error)) from error
    except TooManyTokens as error:
        raise too_long(model, where, str(error)) from error
    if not ids:
        raise InvalidRequest(where, "has no tokens")
    check_room(model, where, len(ids))
    return ids


def _check_tools(model: Model, prompt: Prompt) -> None:
    """Raises InvalidRequest for tools that the model would not see, or whose calls could not be read."""
    if not isinstance(prompt, ChatPrompt) or prompt.tools is None:
        return
    if not model.tokenizer.view.shows_tools:
        raise InvalidRequest(prompt.tools.field, f"the chat template of {model.name!r} shows the model no tools")
    if not model.tokenizer.tool_format:
        where = "function_call" if prompt.tools.legacy else "tool_choice"
        message = f"has to be none: how {model.name!r} writes calls is not known"
        raise InvalidRequest(where, f"{message}, and the gateway's --tool-call-parser does not say it")


async def _predicted(model: Model, text: str, threads: TenantThreads) -> list[int]:
    if not text:
        return []
    try:
        ids = await threads.run(len(text), lambda: model.tokenizer.encode_plain(text, model.max_context_len))
    except CannotSplit as error:
        raise InvalidRequest("prediction", str(error)) from error
    except TooManyTokens as error:
        raise too_long(model, "prediction", str(error)) from error
    if len(ids) > model.max_context_len:
        raise too_long(model, "prediction", f"{len(ids)} tokens")
    return ids


def _token_bytes(tokenizer: ModelTokenizer, prompt: Prompt) -> TokenBytes:
    """In an answer to a chat, the marks of reasoning and tool calls are text."""
    return tokenizer.marked_bytes if isinstance(prompt, ChatPrompt) else tokenizer.token_bytes


def _check_prompt_logprobs(where: str, asked: LogprobsOptions, prompt_len: int) -> None:
    if asked.num_of_prompt(prompt_len) > MAX_PROMPT_LOGPROBS:
        message = f"of a prompt of {prompt_len} tokens would be {asked.num_of_prompt(prompt_len)} numbers"
        raise InvalidRequest(where, f"{message}; at most {MAX_PROMPT_LOGPROBS} are allowed")


def _prompt_tokens(generation: Generation) -> float:
    """Estimated number of prompt tokens, before anything is tokenised, and of the tokens that a client resumes with."""
    match generation.prompt:
        case TokenPrompt(token_ids):
            num_tokens: float = len(token_ids)
        case TextPrompt(text):
            num_tokens = prompt_tokens_of(len(text))
        case ChatPrompt() as chat:
            num_tokens = prompt_tokens_of(chat.num_chars)
    return num_tokens + len(generation.resume_token_ids)
