"""Log probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.options.logprobs import TokenLogprobs

Json = dict[str, Any]
# JSON has no infinity. This is OpenAI's number for an impossible token.
_LOWEST = -9999.0


def chat(tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": tokenizer.spell(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(tokenizer.token_bytes.of(token_id)),
        }

    content = [
        entry(token_id, each.logprob) | {"top_logprobs": [entry(*top) for top in _top(each, num_top)]}
        for token_id, each in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt(
    tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[Json | None]:
    """The prompt's logprobs in vLLM's form: None for the first token, and for each other one a map by token id."""

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokenizer.spell(token_id)}

    def position(token_id: int, each: TokenLogprobs) -> Json:
        # The token's rank is known only if it is one of the likeliest.
        ranks = {top: rank for rank, top in enumerate(each.top_token_ids, start=1)}
        own = {str(token_id): entry(token_id, each.logprob, ranks.get(token_id))}
        return own | {str(top): entry(top, value, ranks[top]) for top, value in _top(each, num_top)}

    return [None, *map(position, token_ids[1:], logprobs)]


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

    @classmethod
    def begin(cls, tokenizer: ModelTokenizer, num_top: int) -> CompletionLogprobs:
        return cls(tokenizer, num_top, Detokeniser(tokenizer.token_bytes))

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """A None in `logprobs` is for the first token of a text."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokeniser.push(token_id))
        pairs = list(zip(token_ids, logprobs, strict=True))
        return {
            "tokens": [self.tokenizer.spell(token_id) for token_id in token_ids],
            "token_logprobs": [each and max(each.logprob, _LOWEST) for each in logprobs],
            "top_logprobs": [each and self._likeliest(token_id, each) for token_id, each in pairs],
            "text_offset": offsets,
        }

    def _likeliest(self, token_id: int, each: TokenLogprobs) -> Json:
        """The likeliest tokens, always with the chosen one, as OpenAI documents it."""
        found = {self.tokenizer.spell(top): max(value, _LOWEST) for top, value in _top(each, self.num_top)}
        return found | {self.tokenizer.spell(token_id): max(each.logprob, _LOWEST)}
