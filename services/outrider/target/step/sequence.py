"""One sequence on the target: its committed tokens, the drafted ones beyond them, and its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine import EngineSequence
from outrider.options.logprobs import TokenLogprobs
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Grammar, LogitsProcessor
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.times import Timer
from outrider.worker.events import SequenceKey


@dataclass(slots=True)
class PromptReport:
    """What the first commit says of the prompt."""

    num_tokens: int = 0
    num_cached_tokens: int | None = None
    """Tokens found in the prefix cache at the first admission."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For the tokens from the second on, as far as they were run."""


@dataclass(slots=True, eq=False)
class TargetSequence:
    """Positions count from the first prompt token."""

    key: SequenceKey
    serial: int
    """Order of opening: the newest is the first to lose its KV."""
    spec: SequenceSpec
    max_context_len: int
    timer: Timer
    drafts: SequenceDrafts
    tokens: list[int] = field(init=False)
    """Prompt and committed output. Only `commit` extends it."""
    kv: EngineSequence | None = None
    """None while it waits for KV blocks, at first and after a preemption."""
    prompt_report: PromptReport | None = field(init=False)
    """None from the first commit on."""
    processor: LogitsProcessor | None = field(init=False)
    """None when the request has no logits options, and until it may run."""
    max_len: int = field(init=False)
    """Tokens at which it ends, by max_new_tokens and by the context."""

    grammar_s: float = 0.0
    """Time of the threads that worked on its grammar."""

    def __post_init__(self) -> None:
        self.prompt_report = PromptReport(len(self.spec.prompt))
        self.tokens = self.drafts.tokens
        self.max_len = min(len(self.spec.prompt) + self.spec.max_new_tokens, self.max_context_len)
        self.processor = None

    def take_grammar(self, grammar: Grammar | None) -> None:
        """It may run from here on: makes the processor of its logits, in the state after the committed tokens."""
        spec = self.spec
        if spec.logits is not None:
            self.processor = LogitsProcessor(spec.logits, spec.prompt, spec.committed, spec.stop_token_ids, grammar)
            if self.processor.has_grammar:
                self.drafts.num_possible = self.processor.num_possible
                self.drafts.cut_impossible()

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def cached_len(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return len(self.kv.tokens) if self.kv is not None else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt log probabilities are sent with the first commit of the answer."""
        asked = self.spec.logprobs
        return asked is not None and asked.prompt and self.prompt_report is not None and not self.spec.committed

    @property
    def pending(self) -> int:
        """Committed tokens still to be run; 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.cached_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_len - len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Draft positions that can be verified in the next step, whose last token is always the target's own."""
        return max(0, min(self.drafts.cap, self.remaining - 1))

    @property
    def compiling(self) -> bool:
        """Whether it may not run yet because its grammar is not compiled."""
        return self.processor is None and self.spec.has_grammar

    @property
    def awaits_mask(self) -> bool:
        """Whether a step would wait in vain for its mask."""
        return self.processor is not None and self.processor.awaits_mask

    def held_until(self, now_s: float) -> float | None:
        """Until when the sequence is held back for a draft, or None when it may be stepped now."""
        if not self.drafts.waits or self.remaining <= 1 or self.pending != 1:
            return None
        until = self.timer.ready_since_s + self.drafts.speculation.max_wait_us * 1e-6
        return until if until > now_s else None

    def grammar_worked(self, seconds: float) -> None:
        """A thread has worked on its grammar: what the drafts may be is known better now."""
        self.grammar_s += seconds
        self.drafts.cut_impossible()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends committed tokens."""
        self.tokens.extend(token_ids)
        if self.processor is not None:
            self.processor.advance(token_ids)
        self.prompt_report = None
