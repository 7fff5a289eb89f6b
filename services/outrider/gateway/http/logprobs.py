"""Log probabilities as the two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.gateway.tokenizer.text import Detokeniser
from outrider.options.logprobs import TokenLogprobs

Json = dict[str, Any]
# JSON has no infinity. OpenAI's number for what cannot come.
_LOWEST = -9999.0


def chat(tokenizer: ModelTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": tokenizer.spell(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(tokenizer.token_bytes.of(token_id)),
        }

    content = [
        entry(token_id, each.logprob)
        | {"top_logprobs": [entry(*top) for top in zip(each.top_token_ids, each.top_logprobs, strict=True)]}
        for token_id, each in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


@dataclass(slots=True)
class CompletionLogprobs:
    """Of one answer: it knows how much text has come."""

    tokenizer: ModelTokenizer
    _detokeniser: Detokeniser
    _offset: int = 0

    @classmethod
    def begin(cls, tokenizer: ModelTokenizer) -> CompletionLogprobs:
        return cls(tokenizer, Detokeniser(tokenizer.token_bytes))

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """None: the first token of a text, which follows nothing."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokeniser.push(token_id))
        pairs = list(zip(token_ids, logprobs, strict=True))
        return {
            "tokens": [self.tokenizer.spell(token_id) for token_id in token_ids],
            "token_logprobs": [each and max(each.logprob, _LOWEST) for each in logprobs],
            "top_logprobs": [each and self._top(token_id, each) for token_id, each in pairs],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, each: TokenLogprobs) -> Json:
        """The token that came is always among them, as OpenAI documents it."""
        found = {
            self.tokenizer.spell(top): max(value, _LOWEST)
            for top, value in zip(each.top_token_ids, each.top_logprobs, strict=True)
        }
        return found | {self.tokenizer.spell(token_id): max(each.logprob, _LOWEST)}
