"""One sequence on the target: its committed tokens, the drafted ones beyond them, and its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.drafting.buffer import DraftBuffer
from outrider.drafting.speculation import Speculation
from outrider.engine import EngineSequence
from outrider.options.logprobs import TokenLogprobs
from outrider.speculation import Grammar, LogitsProcessor, VerificationMode
from outrider.target.requests.opening import Opening
from outrider.target.requests.times import Timer
from outrider.target.step.calibration import Fit
from outrider.tree import DraftTree
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
    opening: Opening
    max_context_len: int
    timer: Timer
    speculation: Speculation = field(init=False)
    tokens: list[int] = field(init=False)
    """Prompt and committed output. Only `commit` extends it."""
    drafts: DraftBuffer = field(default_factory=DraftBuffer)
    kv: EngineSequence | None = None
    """None while it waits for KV blocks, at first and after a preemption."""
    prompt_report: PromptReport | None = field(init=False)
    """None from the first commit on."""
    fit: Fit = field(default_factory=Fit)
    """How well its drafts do, compared with those of others; the worker sets where it starts."""
    processor: LogitsProcessor | None = field(init=False)
    """None when the request has no logits options, and while its grammar is compiled."""
    max_len: int = field(init=False)
    """Tokens at which it ends, by max_new_tokens and by the context."""

    grammar_s: float = 0.0
    """Time of the threads that worked on its grammar."""

    def __post_init__(self) -> None:
        self.speculation = self.opening.speculation
        self.processor = None if self.opening.compiling else self.opening.processor()
        self.prompt_report = PromptReport(len(self.opening.prompt))
        self.tokens = [*self.opening.prompt, *self.opening.committed]
        self.max_len = min(len(self.opening.prompt) + self.opening.stopping.max_new_tokens, self.max_context_len)

    @property
    def mode(self) -> VerificationMode:
        return self.opening.mode

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
        asked = self.opening.logprobs
        return asked is not None and asked.prompt and self.prompt_report is not None and not self.opening.committed

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
        most = max(self.speculation.max_draft_tokens, self.speculation.max_own_draft_tokens)
        return max(0, min(most, self.remaining - 1))

    @property
    def awaits_mask(self) -> bool:
        """Whether a step would wait in vain for its mask."""
        return self.processor is not None and self.processor.awaits_mask

    def held_until(self, now_s: float) -> float | None:
        """Until when the sequence is held back for a draft, or None when it may be stepped now."""
        if not self.drafts.active or self.drafts.has_answer(self.committed_len):
            return None
        if self.remaining <= 1 or self.pending != 1:
            return None
        until = self.timer.ready_since_s + self.speculation.max_wait_us * 1e-6
        return until if until > now_s else None

    def offer(self, tree: DraftTree, received_s: float) -> None:
        """Buffers what is useful of a draft worker's tree."""
        self.drafts.offer(tree, self.tokens, self.speculation.max_draft_tokens)
        self._cut_offered()
        if self.drafts.has_answer(self.committed_len):
            self.timer.draft_answered(received_s)

    def put(self, tree: DraftTree) -> None:
        """Buffers what is useful of a tree that was made in this process."""
        self.drafts.put(tree, self.committed_len, self.speculation.max_own_draft_tokens)
        self._cut_impossible()

    def take_grammar(self, grammar: Grammar) -> None:
        """It may run from here on."""
        self.opening = replace(self.opening, grammar=grammar)
        self.processor = self.opening.processor()
        self._cut_impossible()

    def grammar_worked(self, seconds: float) -> None:
        """A thread has worked on its grammar: what the drafts may be is known better now."""
        self.grammar_s += seconds
        self._cut_offered()

    def adjust(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.drafts.limit(speculation.max_draft_tokens, speculation.max_own_draft_tokens)

    def commit(self, token_ids: Sequence[int], num_drafted: int) -> None:
        """Appends committed tokens."""
        self.drafts.advance(token_ids, num_drafted)
        self.tokens.extend(token_ids)
        if self.processor is not None:
            self.processor.advance(token_ids)
        self._cut_impossible()
        self.prompt_report = None

    def _cut_offered(self) -> None:
        if not self._has_grammar:
            return
        sent = self.drafts.num_sent
        self._cut_impossible()
        if sent and not self.drafts.num_sent:
            # It has answered, with tokens that the grammar forbids: there is nothing to wait for.
            self.drafts.declined_len = self.committed_len

    def _cut_impossible(self) -> None:
        """Drops drafted tokens that no grammar lets through, before they cost a row."""
        if self._has_grammar and self.drafts.trees:
            self.drafts.keep(self._possible)

    @property
    def _has_grammar(self) -> bool:
        return self.processor is not None and self.processor.has_grammar

    def _possible(self, tree: DraftTree) -> DraftTree:
        assert self.processor is not None
        # Ratio mode verifies the first impossible token anyway: it was sampled, and the residual distribution depends
        # on it.
        spared, kept = self.mode is VerificationMode.RATIO, set[int]()
        for path in tree.paths():
            count = self.processor.num_possible([tree.token_ids[node] for node in path])
            kept.update(path[: count + spared])
        return tree if len(kept) == len(tree) else tree.take(sorted(kept))
