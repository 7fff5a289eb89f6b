"""What a request may change in the logits before a token is chosen from them. Names and ranges are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.errors import InvalidRequest

MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """All are functions of the prompt and the committed tokens, so another target with those continues identically.

    The default changes nothing.
    """

    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output has. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence of the token in the output. In [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies others, of tokens in prompt or output. In [0.1, 10]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias added to its logit, in [-100, 100]); no id twice."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are ever chosen. Empty: no limit."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens: the last one is never chosen after the others."""
    min_tokens: int = 0
    """Output tokens before any stop token may be chosen."""
    grammar: str = ""
    """The grammar that the whole output follows, in the form that the target compiles; empty for none. Not with allowed
    tokens, which it may not let through."""

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        _within("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASES)
        for token_id, bias in self.logit_bias:
            _within(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise InvalidRequest("logit_bias", "a token id occurs twice")
        _at_most("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKENS)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for index, word in enumerate(self.bad_words):
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words[{index}]", f"{len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are allowed"
                )
        if len(self.grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest("grammar", f"must be at most {MAX_GRAMMAR_BYTES} bytes")
        if self.grammar and self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "cannot be combined with grammar")
        if self.min_tokens < 0:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is negative")

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def check_vocabulary(self, vocab_size: int, where: str = "") -> None:
        """Raises InvalidRequest when a token id is outside. The message does not repeat the id. `where`: path of the
        options."""
        named = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": [token_id for word in self.bad_words for token_id in word],
        }
        for name, token_ids in named.items():
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
                raise InvalidRequest(f"{where}{name}", f"a token id is outside the vocabulary of {vocab_size}")


def _within(name: str, value: float, least: float, most: float) -> None:
    # Single precision, in which it travels, may round a bound outwards. Written so that NaN fails too.
    if not (math.isfinite(value) and least * (1 - 1e-6 * math.copysign(1, least)) <= value <= most * (1 + 1e-6)):
        raise InvalidRequest(name, f"{value:g} is not allowed; it has to be from {least:g} to {most:g}")


def _at_most(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(name, f"{count} entries; at most {most} are allowed")
