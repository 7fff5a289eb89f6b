"""What a router requests when it opens a sequence, checked against this worker's limits before anything runs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafting import source as drafting
from outrider.drafting.source import DraftLimits
from outrider.drafting.speculation import PLAIN, Speculation
from outrider.errors import InvalidRequest
from outrider.options.logprobs import LogprobsOptions, TokenLogprobs
from outrider.protocol.validate import check_label, check_opening, check_prediction
from outrider.speculation import Grammar, LogitsOptions, LogitsProcessor, SamplingParams, VerificationMode
from outrider.target.grammars.grammar import GrammarCompiler

SAMPLED_TOP = 8
"""Likeliest tokens that a sample has at each position."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that every message is checked against."""

    vocab_size: int
    max_context_len: int
    """Prompt and output tokens of one sequence."""
    block_size: int
    num_blocks: int
    max_sequences: int = 64
    """Open sequences, those without KV included."""
    max_draft_tokens: int = 32
    """Draft positions verified in one step."""
    grammars: GrammarCompiler | None = None
    """None when structured output is not served."""
    samples: bool = False
    """Whether samples are recorded, where a tenant consents."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends."""

    max_new_tokens: int
    """Output tokens, counted from the end of the prompt."""
    stop_token_ids: frozenset[int] = frozenset()


class SampleConsent(enum.IntEnum):
    """What may be recorded of a sequence; the values are those of the message."""

    OFF = 0
    ACCEPTANCE = 1
    TEXT = 2


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything a target needs to take over a sequence at any point of its life."""

    prompt: tuple[int, ...]
    params: SamplingParams
    mode: VerificationMode
    stopping: Stopping
    committed: tuple[int, ...] = ()
    """Output tokens committed so far, here or elsewhere."""
    speculation: Speculation = PLAIN
    salt: bytes = b""
    logits: LogitsOptions | None = None
    grammar: Grammar | None = None
    """The compiled grammar of `logits`, after the committed tokens. Set later than the rest: see `compiling`."""
    logprobs: LogprobsOptions | None = None
    prediction: tuple[int, ...] = ()
    """The output that the client expects, in large part."""
    request_id: str = ""
    tenant: str = ""
    samples: SampleConsent = SampleConsent.OFF
    consent_us: int = 0
    """When a gateway has read it, by the metadata store's clock; 0: it has none. What was ordered to be erased later
    is not remembered."""

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

    @property
    def log_fields(self) -> dict[str, str]:
        """For log lines about it."""
        return {"request_id": self.request_id, "tenant": self.tenant}

    @property
    def compiling(self) -> bool:
        """Whether the sequence may not run yet because its grammar is not compiled."""
        return self.grammar is None and self.logits is not None and bool(self.logits.grammar)

    def for_drafts(self, limits: DraftLimits, *, learns: bool = True) -> drafting.SourceOpening:
        """What a source of drafts needs of it."""
        return drafting.SourceOpening(
            prompt=self.prompt,
            params=self.params,
            mode=self.mode,
            committed=self.committed,
            limits=limits,
            max_new_tokens=self.stopping.max_new_tokens,
            stop_token_ids=self.stopping.stop_token_ids,
            salt=self.salt,
            tenant=self.tenant,
            learns=learns,
            prediction=self.prediction,
            log_fields=self.log_fields,
        )

    def processor(self) -> LogitsProcessor | None:
        """The processor of its logits, in its state after the committed tokens."""
        if self.logits is None:
            return None
        stops = self.stopping.stop_token_ids
        return LogitsProcessor(self.logits, self.prompt, self.committed, stops, self.grammar)

    def check(self, limits: Limits) -> None:
        """Raises InvalidRequest when this worker could never serve it to the end."""
        check_opening(
            prompt=self.prompt,
            committed=self.committed,
            max_new_tokens=self.stopping.max_new_tokens,
            stop_token_ids=sorted(self.stopping.stop_token_ids),
            params=self.params,
            mode=self.mode,
            salt=self.salt,
            vocab_size=limits.vocab_size,
            max_context_len=limits.max_context_len,
        )
        self.speculation.check(limits.max_draft_tokens)
        check_prediction(self.prediction, limits.vocab_size, limits.max_context_len)
        check_label("request_id", self.request_id)
        check_label("tenant", self.tenant)
        if self.logits is not None:
            self.logits.check_vocabulary(limits.vocab_size, "logits.")
        longest = min(len(self.prompt) + self.stopping.max_new_tokens, limits.max_context_len)
        capacity = limits.block_size * limits.num_blocks
        if longest > capacity:
            message = f"{longest} tokens with the prompt; the KV cache of this worker holds {capacity}"
            raise InvalidRequest("stopping.max_new_tokens", message)
