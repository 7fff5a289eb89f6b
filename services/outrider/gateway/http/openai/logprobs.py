"""Log probabilities in the forms of the two endpoints.

They are most of an answer: each is written as it comes, and the event loop goes on with others in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.gateway.http.json_bytes import Array, Json
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.rpc.v1.sequence_pb2 import TokenLogprobs

T = TypeVar("T")
# JSON has no infinity. This is OpenAI's number for an impossible token.
_LOWEST = -9999.0
_TURN = 16
"""Tokens that are written before others get their turn: with twenty likeliest ones each, about a millisecond."""


@dataclass(slots=True)
class ChatLogprobs:
    """Writes the logprobs of one answer to a chat."""

    tokenizer: ModelTokenizer
    num_top: int
    content: Array = field(default_factory=Array)

    async def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        async for token_id, each in _in_turns(zip(token_ids, logprobs, strict=True)):
            top = [self._entry(*one) for one in _top(each, self.num_top)]
            self.content.add(self._entry(token_id, each.logprob) | {"top_logprobs": top})

    def take(self) -> Json:
        """What was added since the last call."""
        content, self.content = self.content, Array()
        return {"content": content, "refusal": None}

    @property
    def num_bytes(self) -> int:
        return len(self.content.data)

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self.tokenizer.spell(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(self.tokenizer.token_bytes.of(token_id)),
        }


async def prompt_logprobs(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> Array:
    """The prompt's logprobs in vLLM's form: None for the first token, and for each other one a map by token id."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.spell(token_id)}

    def position(token_id: int, each: TokenLogprobs) -> Json:
        # The token's rank is known only if it is one of the likeliest.
        ranks = {top: rank for rank, top in enumerate(each.top_token_ids, start=1)}
        own = {str(token_id): entry(token_id, each.logprob, ranks.get(token_id))}
        return own | {str(top): entry(top, value, ranks[top]) for top, value in _top(each, num_top)}

    array = Array()
    array.add(None)
    async for token_id, each in _in_turns(zip(token_ids[1:], logprobs, strict=True)):
        array.add(position(token_id, each))
    return array


async def _in_turns(entries: Iterable[T]) -> AsyncIterator[T]:
    for number, entry in enumerate(entries):
        if number % _TURN == 0:
            await asyncio.sleep(0)
        yield entry


def _top(each: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """The likeliest, as many as requested here: the request may ask for another number for the prompt."""
    return list(zip(each.top_token_ids[:num_top], each.top_logprobs[:num_top], strict=True))


@dataclass(slots=True)
class CompletionLogprobs:
    """Writes the logprobs of one answer, and tracks the offset in its text."""

    tokenizer: ModelTokenizer
    num_top: int
    _detokeniser: Detokeniser
    _offset: int = 0
    _arrays: dict[str, Array] = field(default_factory=lambda: _empty())

    @classmethod
    def begin(cls, tokenizer: ModelTokenizer, num_top: int) -> CompletionLogprobs:
        return cls(tokenizer, num_top, Detokeniser(tokenizer.token_bytes))

    async def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """A None in `logprobs` is for the first token of a text."""
        async for token_id, each in _in_turns(zip(token_ids, logprobs, strict=True)):
            self._arrays["tokens"].add(self.tokenizer.spell(token_id))
            self._arrays["token_logprobs"].add(each and max(each.logprob, _LOWEST))
            self._arrays["top_logprobs"].add(each and self._likeliest(token_id, each))
            self._arrays["text_offset"].add(self._offset)
            self._offset += len(self._detokeniser.push(token_id))

    def take(self) -> Json:
        """What was added since the last call."""
        arrays, self._arrays = self._arrays, _empty()
        return dict(arrays)

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self._arrays.values())

    def _likeliest(self, token_id: int, each: TokenLogprobs) -> Json:
        """The likeliest tokens, always with the chosen one, as OpenAI documents it."""
        found = {self.tokenizer.spell(top): max(value, _LOWEST) for top, value in _top(each, self.num_top)}
        return found | {self.tokenizer.spell(token_id): max(each.logprob, _LOWEST)}


def _empty() -> dict[str, Array]:
    return {name: Array() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
