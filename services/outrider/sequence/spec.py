"""All that a worker needs to take over a sequence at any point of its life: one type, with one check, in every process.

`outrider.protocol.sequences` reads it from messages, and writes it to them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outrider.errors import InvalidRequest
from outrider.limits import MAX_SALT_BYTES, MAX_UINT32, check_label, check_token_ids
from outrider.options.logits import LogitsOptions
from outrider.options.logprobs import LogprobsOptions, TokenLogprobs
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.sequence.speculation import PLAIN, Speculation

SAMPLED_TOP = 8
"""Likeliest tokens that a sample has at each position."""


class SampleConsent(enum.IntEnum):
    """What may be recorded of a sequence; the values are those of the message."""

    OFF = 0
    ACCEPTANCE = 1
    TEXT = 2


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    committed_field: ClassVar[str] = "committed_token_ids"
    """Its name in the message."""
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: VerificationMode
    max_new_tokens: int = MAX_UINT32
    """Output tokens, counted from the end of the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    committed: tuple[int, ...] = ()
    """Output tokens committed so far, here or elsewhere."""
    speculation: Speculation = PLAIN
    """At the opening; what a source of drafts is told of it there."""
    salt: bytes = b""
    """Nothing that is cached or learnt of it is used under another salt."""
    logits: LogitsOptions | None = None
    logprobs: LogprobsOptions | None = None
    prediction: tuple[int, ...] = ()
    """The output that the client expects, in large part."""
    request_id: str = ""
    tenant: str = ""
    samples: SampleConsent = SampleConsent.OFF
    consent_unix_us: int = 0
    """When a gateway has read it, by the metadata store's clock; 0: it has none. What was ordered to be erased later
    is not remembered."""
    learns: bool = True
    """Whether anything may be learnt from it here."""

    def check(self, vocab_size: int, max_context_len: int, *, room: int = 1) -> None:
        """Raises InvalidRequest, by the name of the message's field. `room`: so many output tokens are still to come,
        at least."""
        if not self.prompt:
            raise InvalidRequest("prompt_token_ids", "must have at least one token")
        check_token_ids("prompt_token_ids", self.prompt, vocab_size)
        check_token_ids(self.committed_field, self.committed, vocab_size)
        if self.max_new_tokens < 1:
            raise InvalidRequest("stopping.max_new_tokens", "must be at least 1")
        check_token_ids("stopping.stop_token_ids", sorted(self.stop_token_ids), vocab_size)
        if len(self.committed) + room > self.max_new_tokens:
            message = f"{len(self.committed)} where stopping.max_new_tokens is {self.max_new_tokens}"
            raise InvalidRequest(self.committed_field, message)
        if (length := self.num_tokens) + room > max_context_len:
            name = self.committed_field if len(self.prompt) < max_context_len else "prompt_token_ids"
            raise InvalidRequest(name, f"{length} tokens leave no room in a context of {max_context_len}")
        if self.params.greedy != (self.mode is VerificationMode.GREEDY):
            raise InvalidRequest("mode", f"{self.mode.name} does not go with temperature {self.params.temperature:g}")
        if len(self.salt) > MAX_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"must be at most {MAX_SALT_BYTES} bytes, got {len(self.salt)}")
        if len(self.prediction) > max_context_len:
            message = f"{len(self.prediction)} tokens; at most {max_context_len} are allowed"
            raise InvalidRequest("predicted_token_ids", message)
        check_token_ids("predicted_token_ids", self.prediction, vocab_size)
        for name, value in self.log_fields.items():
            check_label(name, value)
        if self.logits is not None:
            self.logits.check_vocabulary(vocab_size, "logits.")

    @property
    def log_fields(self) -> dict[str, str]:
        """For log lines about it."""
        return {"request_id": self.request_id, "tenant": self.tenant}

    @property
    def tokens(self) -> list[int]:
        """Those that an engine begins with: the prompt, and what was committed elsewhere."""
        return [*self.prompt, *self.committed]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.committed)

    @property
    def has_grammar(self) -> bool:
        return self.logits is not None and bool(self.logits.grammar)

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to compute at each position; None: no log probabilities."""
        asked = None if self.logprobs is None else self.logprobs.num_top
        return asked if self.samples is not SampleConsent.TEXT else max(asked or 0, SAMPLED_TOP)

    def asked_logprobs(self, found: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Those that the request asks for, of those that were computed."""
        if self.logprobs is None:
            return ()
        if self.num_top == self.logprobs.num_top:
            return found
        n = self.logprobs.num_top
        return [TokenLogprobs(one.logprob, one.top_token_ids[:n], one.top_logprobs[:n]) for one in found]
