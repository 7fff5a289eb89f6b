"""Converts answers into messages of vLLM's engine service. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as vllm

from outrider.gateway.generation.generation import Answer, Chunk
from outrider.gateway.vllm.requests import LogprobsAsked
from outrider.options.logprobs import TokenLogprobs


@dataclass(slots=True)
class EngineAnswer:
    """One of a request's answers, from its first tokens to `complete`.

    In a stream, each chunk's message has its tokens and logprobs. `complete` has all tokens again, and the logprobs
    unless they were streamed.
    """

    index: int
    answer: Answer
    stream: bool
    asked: LogprobsAsked
    ended: bool = False
    _chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> Iterator[vllm.GenerateResponse]:
        is_first = not self._chunks
        self._chunks.append(chunk)
        if self.stream and chunk.token_ids:
            yield vllm.GenerateResponse(chunk=self._chunk(chunk, is_first))
        if chunk.finish is not None:
            yield self.complete(chunk.finish.reason)

    def complete(self, reason: str) -> vllm.GenerateResponse:
        """The last message. `reason`: `stop`, `length` or `abort`."""
        self.ended = True
        finish = self._chunks[-1].finish if self._chunks else None
        token_ids = [token_id for chunk in self._chunks for token_id in chunk.token_ids]
        message = vllm.GenerateComplete(
            output_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=len(self.answer.prompt_token_ids),
            completion_tokens=len(token_ids),
            index=self.index,
        )
        if finish is not None:
            message.cached_tokens = finish.usage.cached_tokens
            message.spec_draft_tokens = finish.summary.sums.num_draft_tokens
            message.spec_accepted_tokens = finish.summary.sums.num_accepted_draft_tokens
            self._set_matched_stop(message, finish.matched_stop)
        if not self.stream and self._chunks:
            whole = Chunk.join(self._chunks)
            self._set_logprobs(message, whole, with_prompt=True)
        return vllm.GenerateResponse(complete=message)

    def _chunk(self, chunk: Chunk, is_first: bool) -> vllm.GenerateStreamChunk:
        message = vllm.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self.answer.prompt_token_ids),
            completion_tokens=len(chunk.token_ids),
            index=self.index,
        )
        self._set_logprobs(message, chunk, with_prompt=is_first)
        return message

    def _set_matched_stop(self, message: vllm.GenerateComplete, stop: int | str | None) -> None:
        """As in vLLM, not set for the model's end-of-sequence token."""
        if isinstance(stop, str):
            message.matched_stop_str = stop
        elif stop is not None and stop in self.answer.options.stop_token_ids:
            message.matched_token_id = stop

    def _set_logprobs(
        self, message: vllm.GenerateStreamChunk | vllm.GenerateComplete, chunk: Chunk, *, with_prompt: bool
    ) -> None:
        if self.asked.output is not None:
            logprobs = message.output_logprobs
            logprobs.token_ids.extend(chunk.token_ids)
            logprobs.token_logprobs.extend(each.logprob for each in chunk.logprobs)
            if self.asked.output:
                logprobs.top_logprobs.extend(_top(chunk.logprobs, self.asked.output))
        if self.asked.prompt is not None and with_prompt:
            of_prompt = message.input_logprobs
            of_prompt.token_ids.extend(self.answer.prompt_token_ids)
            # The first token of the prompt has no logprob.
            of_prompt.token_logprobs.add()
            for each in chunk.prompt_logprobs:
                of_prompt.token_logprobs.add(value=each.logprob)
            if self.asked.prompt:
                of_prompt.top_logprobs.add()
                of_prompt.top_logprobs.extend(_top(chunk.prompt_logprobs, self.asked.prompt))


def _top(found: Sequence[TokenLogprobs], count: int) -> Iterator[vllm.TopLogProbs]:
    """The likeliest tokens at each position."""
    for each in found:
        yield vllm.TopLogProbs(values=each.top_logprobs[:count], token_ids=each.top_token_ids[:count])
