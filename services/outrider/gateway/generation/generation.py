"""The path of every request, from any of the APIs: admit, tokenise, route, detokenise, end.

A request survives the loss of its router. The gateway sends the tokens already delivered to another router, which
continues the same answer; the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from outrider.errors import Code, DeadlineExceeded, InvalidRequest, OutriderError, Unavailable
from outrider.gateway.config import Failover
from outrider.gateway.generation.answers import Answer, Chunk
from outrider.gateway.generation.context_length import check_room, max_new_tokens, too_long
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.gateway.generation.observer import observed
from outrider.gateway.generation.pacing import Beat
from outrider.gateway.generation.requests import ChatPrompt, Generation, Prompt, TextPrompt, TokenPrompt
from outrider.gateway.generation.retry import RouterRetry
from outrider.gateway.routers.routers import RouterPool
from outrider.gateway.tenants.admission import Admission
from outrider.gateway.tenants.auth import check_model, default_tenant
from outrider.gateway.tenants.quota_keeper import Charge, QuotaKeeper
from outrider.gateway.tenants.quotas import prompt_tokens_of
from outrider.gateway.tokenizer.catalog import Catalog, Model
from outrider.gateway.tokenizer.model import CannotSplit, TooManyTokens
from outrider.gateway.tokenizer.template import TemplateError
from outrider.gateway.tokenizer.threads import TenantThreads, TokenizerThreads
from outrider.gateway.tools.parsers.reasoning import Thought
from outrider.limits import check_token_ids
from outrider.options.logprobs import MAX_PROMPT_LOGPROBS, LogprobsOptions
from outrider.protocol import logprobs
from outrider.protocol.receipts import ReceiptKey
from outrider.rpc.v1 import router_pb2, sequence_pb2, tenants_pb2
from outrider.telemetry.context import NO_CONTEXT, TraceContext
from outrider.telemetry.tracing import Tracing

log = logging.getLogger(__name__)
_TOO_LATE = "the deadline passed before the answer was complete"


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
            observers = iter(
                [
                    stack.enter_context(observed(self.metrics, self.tracing, each, trace_context, started_s))
                    for each in generations
                ]
            )
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
            answers = []
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
                    answer = Answer.of(
                        *(shared, generation, model.tokenizer, next(observers), self.receipt_key),
                        deadline_s=started_s + patience_s,
                        pays_prompt=not number,
                    )
                    answers.append(await stack.enter_async_context(self._answering(answer, charge)))
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
    async def _answering(self, answer: Answer, charge: Charge) -> AsyncIterator[Answer]:
        answer.observer.prepared(answer.id, answer.model, len(answer.prompt_token_ids))
        try:
            async with aclosing(self._charged(self._run(answer), charge)) as answer.chunks:
                yield answer
        finally:
            charge.ended(answer.request.billed_prompt_tokens, answer.num_new_tokens)

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

    async def _run(self, answer: Answer) -> AsyncGenerator[Chunk, None]:
        observer = answer.observer
        delta = answer.output.resume(answer.generation.resume_token_ids)
        if (finish := answer.finish(self.clock())) is not None:
            observer.chunk(0, finish, self.clock())
            yield Chunk(delta, (), 0, finish)
            return
        answer.stats.submitted_s = self.clock()
        async with aclosing(self._rounds(answer)) as rounds:
            async for response in rounds:
                if response.phase == router_pb2.ROUTE_PHASE_OPENED:
                    answer.stats.opened(self.clock())
                    observer.opened()
                chunk = answer.take(response, self.clock())
                observer.chunk(len(chunk.token_ids), chunk.finish, self.clock())
                if chunk.finish:
                    self.beat.answered(chunk.finish.summary.mean_itl_ms / 1e3)
                if chunk.token_ids or chunk.finish:
                    yield chunk
                if chunk.finish:
                    # Leaving the block cancels the call, which also stops the router at our stop strings.
                    return

    async def _rounds(self, answer: Answer) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """Every round of the request. Changes the router when one is lost."""
        retry = RouterRetry(self.failover)
        while True:
            try:
                async with aclosing(self._attempt(answer, retry)) as rounds:
                    async for response in rounds:
                        if response.token_ids or response.phase == router_pb2.ROUTE_PHASE_ACCEPTED:
                            retry.got_on()
                        yield response
                return
            except _RouterLost as lost:
                pause_s = retry.pause_s(self.clock())
                called = not isinstance(lost, _NoRouter)
                if pause_s is None:
                    message = (
                        f"{retry.num_breaks} calls to routers broke off; the last: {lost}" if called else str(lost)
                    )
                    raise Unavailable(message, reason="ROUTERS_FAILED", retry_after_s=1.0) from lost
            if called:
                log.warning("call to a router broke off", extra={**answer.about, "breaks": retry.num_breaks})
                self.metrics.failover(resumed=bool(answer.output.token_ids))
                answer.stats.num_router_failovers += 1
            await asyncio.sleep(min(pause_s, max(0.0, answer.deadline_s - self.clock())))

    async def _attempt(self, answer: Answer, retry: RouterRetry) -> AsyncGenerator[router_pb2.RouteResponse, None]:
        """One call to one router. Raises _RouterLost if another router may succeed, OutriderError otherwise."""
        remaining_s = answer.deadline_s - self.clock()
        if remaining_s <= 0:
            raise DeadlineExceeded(_TOO_LATE)
        try:
            router = await self.routers.pick(answer.request.tenant)
        except Unavailable as none_known:
            raise _NoRouter(str(none_known)) from none_known
        try:
            async with aclosing(router.stream.route(answer.route_request(), remaining_s)) as rounds:
                async for response in rounds:
                    self.routers.answered(router)
                    yield response
        except OutriderError as error:
            if error.code is Code.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(_TOO_LATE) from error
            if not retry.goes_on(error, has_tokens=answer.num_new_tokens > 0):
                error.field = answer.options.logits.client_field(error.field)
                raise
            self.routers.failed(router)
            raise _RouterLost(str(error)) from error


class _RouterLost(Exception):
    """A call to a router broke off, and another router may succeed."""


class _NoRouter(_RouterLost):
    """There was none to call; one may come."""


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
