"""The answers to one client request, as they grow: to one prompt or several, and several to each (`n`, `best_of`).

The other answers to a prompt start after the first token of the first one. They then find the prompt in the target's
prefix cache, so that it is prefilled once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.errors import InternalError
from outrider.gateway.generation.observer import RequestObserver
from outrider.gateway.generation.output import FinishReason, Output, parser_of
from outrider.gateway.generation.requests import ChatPrompt, Generation, Options, Prompt
from outrider.gateway.generation.stats import AnswerFinish, RunningStats, Usage
from outrider.gateway.tenants.admission import Kept
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tools.parsers.tool_calls import Delta
from outrider.options.prediction import Prediction
from outrider.protocol.receipts import ReceiptKey, receipt_of
from outrider.rpc.v1 import router_pb2, sequence_pb2

log = logging.getLogger(__name__)


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
    def signed(self) -> dict[str, str]:
        """The field that a receipt adds to the JSON of the answer's end."""
        return {"receipt": self.finish.receipt} if self.finish and self.finish.receipt else {}

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


@dataclass(slots=True)
class Answer:
    """The answer to an admitted, valid request, and what its router is asked for it."""

    request: router_pb2.RouteRequest
    generation: Generation
    tokenizer: ModelTokenizer
    observer: RequestObserver
    deadline_s: float
    """On the monotonic clock."""
    output: Output
    stats: RunningStats
    prediction: Prediction
    receipt_key: ReceiptKey
    chunks: AsyncIterator[Chunk] = field(init=False)
    """Yields its tokens; the last chunk has `finish`."""

    @classmethod
    def of(
        cls,
        shared: router_pb2.RouteRequest,
        generation: Generation,
        tokenizer: ModelTokenizer,
        observer: RequestObserver,
        receipt_key: ReceiptKey,
        *,
        deadline_s: float,
        pays_prompt: bool,
    ) -> Answer:
        """`shared`: what all answers to its prompt ask for. `pays_prompt`: whether the prompt is charged and billed
        with this answer, and not with another one to it."""
        options, prompt = generation.options, shared.prompt_token_ids
        eos = () if options.ignore_eos else tokenizer.eos_token_ids
        # In an answer to a chat, the marks of reasoning and tool calls are text.
        chats = isinstance(generation.prompt, ChatPrompt)
        output = Output(
            token_bytes=tokenizer.marked_bytes if chats else tokenizer.token_bytes,
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
            speculation=options.speculation,
            max_draft_tokens=options.max_draft_tokens,
            traceparent=observer.context.traceparent,
            tracestate=observer.context.tracestate,
            # What the client resumes with is run like a prompt.
            billed_prompt_tokens=(len(prompt) if pays_prompt else 0) + len(generation.resume_token_ids),
            num_resumed_by_client=len(generation.resume_token_ids),
        )
        request.MergeFrom(shared)
        prediction = Prediction(shared.predicted_token_ids)
        prediction.extend(generation.resume_token_ids)
        stats = RunningStats(observer.started_s)
        return cls(request, generation, tokenizer, observer, deadline_s, output, stats, prediction, receipt_key)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def options(self) -> Options:
        return self.generation.options

    @property
    def prompt(self) -> Prompt:
        return self.generation.prompt

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.request.prompt_token_ids

    @property
    def about(self) -> dict[str, str]:
        """Fields of a log line about it."""
        return {"request_id": self.id, "tenant": self.request.tenant}

    @property
    def num_new_tokens(self) -> int:
        """Without those that the client resumes with."""
        return len(self.output.token_ids) - len(self.generation.resume_token_ids)

    @property
    def usage(self) -> Usage:
        predicted, cached = self.prediction, self.stats.sums.num_cached_tokens
        counts = predicted.num_accepted, predicted.num_rejected
        return Usage(len(self.prompt_token_ids), len(self.output.token_ids), cached, *counts)

    def route_request(self) -> router_pb2.RouteRequest:
        """The router's request for the rest of the answer: all of it, or what is left after a router was lost."""
        self.request.resume_token_ids[:] = self.output.token_ids
        if self.stats.revisions:
            self.request.resume_revision = self.stats.revisions[-1][0]
        return self.request

    def take(self, response: router_pb2.RouteResponse, now_s: float) -> Chunk:
        """Adds one round's tokens, up to the end of the answer."""
        num_before = len(self.output.token_ids)
        self.stats.generated_by(response.model_revision, num_before)
        self.stats.add_round(response)
        delta = self.output.push(response.token_ids)
        if self.output.finish_reason is None and response.finish_reason != sequence_pb2.FINISH_REASON_UNSPECIFIED:
            self.output.end(_reason_of(response), delta)
        token_ids = tuple(self.output.token_ids[num_before:])
        self.prediction.extend(token_ids)
        self.stats.add_tokens(len(token_ids), now_s)
        if self.options.asked_logprobs and len(response.logprobs) != len(response.token_ids):
            given = len(response.logprobs), len(response.token_ids)
            log.error("the router gave %d log probabilities for %d tokens", *given, extra=self.about)
            raise InternalError("the router gave too few log probabilities")
        num_accepted, logprobs = min(response.num_accepted, len(token_ids)), response.logprobs[: len(token_ids)]
        return Chunk(delta, token_ids, num_accepted, self.finish(now_s), logprobs, response.prompt_logprobs)

    def finish(self, now_s: float) -> AnswerFinish | None:
        """None: it has not ended yet."""
        if (reason := self.output.finish_reason) is None:
            return None
        return AnswerFinish(reason, self.usage, self.stats.summary(now_s), self.output.matched_stop, self._receipt())

    def _receipt(self) -> str:
        if not self.options.receipt:
            return ""
        receipt = receipt_of(self.route_request(), self.options.stop, self.stats.revisions, self.stats.draft_kinds)
        return self.receipt_key.sign(receipt)


def _reason_of(response: router_pb2.RouteResponse) -> FinishReason:
    """Why the router ended the answer."""
    reason = response.finish_reason
    if reason not in (sequence_pb2.FINISH_REASON_STOP, sequence_pb2.FINISH_REASON_LENGTH):
        raise InternalError(f"the router ended the request with finish reason {reason}")
    return "stop" if reason == sequence_pb2.FINISH_REASON_STOP else "length"


@dataclass(frozen=True, slots=True)
class Choices:
    """Running answers, in the order of the prompts, then of the answers to each."""

    answers: list[Answer]
    num_prompts: int
    kept: Kept
    """To be told of what is kept of them until they are whole."""
    finishes: dict[int, AnswerFinish] = field(default_factory=dict)
    """Of the answers that have ended, by their numbers."""
    _tokens: Counter[int] = field(default_factory=Counter)

    @property
    def id(self) -> str:
        return self.answers[0].id

    @property
    def model(self) -> str:
        return self.answers[0].model

    @property
    def per_prompt(self) -> int:
        return len(self.answers) // self.num_prompts

    def so_far(self, number: int) -> Usage:
        """The usage of one answer that may still run."""
        return Usage(len(self.answers[number].prompt_token_ids), self._tokens[number], 0)

    @property
    def usage(self) -> Usage:
        """To be read at the end. A prompt counts once for all its answers, and those that are not shown count too."""
        firsts = [finish.usage for number, finish in self.finishes.items() if not number % self.per_prompt]
        shown = [
            finish.usage.completion_tokens
            for number, finish in self.finishes.items()
            if not self.answers[number].options.prompt_only
        ]
        every = [finish.usage for finish in self.finishes.values()]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(shown),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.accepted_prediction_tokens for usage in every),
            sum(usage.rejected_prediction_tokens for usage in every),
        )

    async def kept_chunks(self) -> AsyncGenerator[Chunk, None]:
        """Those of the one answer, of which nothing is sent before it is whole."""
        async for _, chunk in self.chunks():
            self.kept.add(0)
            yield chunk

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(number of the answer, chunk), as they arrive. Raises the first error of any answer and ends the others."""
        if len(self.answers) == 1:
            async for chunk in self.answers[0].chunks:
                yield self._counted(0, chunk)
            return
        async with aclosing(self._merged()) as merged:
            async for numbered in merged:
                yield self._counted(*numbered)

    def _counted(self, number: int, chunk: Chunk) -> tuple[int, Chunk]:
        self._tokens[number] += len(chunk.token_ids)
        if chunk.finish is not None:
            self.finishes[number] = chunk.finish
        return number, chunk

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        # What is not taken stays with the answers.
        came: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue(len(self.answers))
        begun = [asyncio.Event() for _ in range(self.num_prompts)]
        tasks = [
            asyncio.create_task(self._feed(number, came, begun[number // self.per_prompt]))
            for number in range(len(self.answers))
        ]
        try:
            running = len(tasks)
            while running:
                numbered = await came.get()
                if isinstance(numbered, Exception):
                    raise numbered
                yield numbered
                running -= numbered[1].finish is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self, number: int, came: asyncio.Queue[tuple[int, Chunk] | Exception], begun: asyncio.Event
    ) -> None:
        if number % self.per_prompt:
            await begun.wait()
        try:
            async for chunk in self.answers[number].chunks:
                await came.put((number, chunk))
                begun.set()
        except Exception as error:
            await came.put(error)
