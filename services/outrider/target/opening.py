"""What a router asks for when it opens a sequence, and what this worker can hold. Checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.protocol.limits import MAX_SALT_BYTES, MAX_STOP_TOKENS
from outrider.speculation import LogitsOptions, LogitsProcessor, SamplingParams, VerificationMode


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that every message is held against."""

    vocab_size: int
    max_context_len: int
    """Prompt and output tokens of one sequence."""
    block_size: int
    num_blocks: int
    max_sequences: int = 64
    """Open sequences, those without KV included."""
    max_draft_tokens: int = 32
    """Drafted tokens judged in one step."""
    max_run_ahead_tokens: int = 256
    max_wait_us: int = 10_000_000

    @property
    def max_draft_message(self) -> int:
        """Most tokens of one Draft message."""
        return self.max_draft_tokens + self.max_run_ahead_tokens


@dataclass(frozen=True, slots=True)
class Speculation:
    """How far drafts may ride ahead of one sequence. The default is plain decoding."""

    max_draft_tokens: int = 0
    """Most drafted tokens judged in one step."""
    max_wait_us: int = 0
    """Longest the sequence is held back for a draft, from the moment it stands ready."""
    run_ahead_tokens: int = 0
    """Drafted tokens kept beyond those of the next step."""

    @property
    def capacity(self) -> int:
        """Drafted tokens worth keeping."""
        return self.max_draft_tokens + self.run_ahead_tokens if self.max_draft_tokens else 0

    def check(self, limits: Limits) -> None:
        """Raises InvalidRequest."""
        bounds = {
            "max_draft_tokens": limits.max_draft_tokens,
            "max_wait_us": limits.max_wait_us,
            "run_ahead_tokens": limits.max_run_ahead_tokens,
        }
        for name, bound in bounds.items():
            value = getattr(self, name)
            if not 0 <= value <= bound:
                raise InvalidRequest(f"speculation.{name}", f"must be at most {bound}, got {value}")


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends."""

    max_new_tokens: int
    """Output tokens, counted from the end of the prompt."""
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything a target needs to take over a sequence at any point of its life."""

    prompt: tuple[int, ...]
    params: SamplingParams
    mode: VerificationMode
    stopping: Stopping
    committed: tuple[int, ...] = ()
    """Output tokens committed so far, here or elsewhere."""
    speculation: Speculation = Speculation()
    salt: bytes = b""
    logits: LogitsOptions | None = None

    def processor(self) -> LogitsProcessor | None:
        """What the logits go through, as it is after the committed tokens."""
        if self.logits is None:
            return None
        return LogitsProcessor(self.logits, self.prompt, self.committed, self.stopping.stop_token_ids)

    def check(self, limits: Limits) -> None:
        """Raises InvalidRequest when this worker could never serve it to the end."""
        if not self.prompt:
            raise InvalidRequest("prompt_token_ids", "must have at least one token")
        check_tokens("prompt_token_ids", self.prompt, limits.vocab_size)
        check_tokens("committed_token_ids", self.committed, limits.vocab_size)
        self._check_stopping(limits)
        self._check_room(limits)
        self._check_mode()
        self.speculation.check(limits)
        if self.logits is not None:
            self.logits.check_vocabulary(limits.vocab_size, "logits.")
        if len(self.salt) > MAX_SALT_BYTES:
            raise InvalidRequest("cache_salt", f"must be at most {MAX_SALT_BYTES} bytes, got {len(self.salt)}")

    def _check_stopping(self, limits: Limits) -> None:
        stops = self.stopping.stop_token_ids
        if self.stopping.max_new_tokens < 1:
            raise InvalidRequest("stopping.max_new_tokens", "must be at least 1")
        if len(stops) > MAX_STOP_TOKENS:
            raise InvalidRequest("stopping.stop_token_ids", f"must be at most {MAX_STOP_TOKENS}, got {len(stops)}")
        check_tokens("stopping.stop_token_ids", sorted(stops), limits.vocab_size)
        if len(self.committed) >= self.stopping.max_new_tokens:
            raise InvalidRequest("committed_token_ids", "already as many as stopping.max_new_tokens")

    def _check_room(self, limits: Limits) -> None:
        length, context = len(self.prompt) + len(self.committed), limits.max_context_len
        if length >= context:
            name = "committed_token_ids" if len(self.prompt) < context else "prompt_token_ids"
            raise InvalidRequest(name, f"{length} tokens leave no room in a context of {context}")
        longest = min(len(self.prompt) + self.stopping.max_new_tokens, context)
        capacity = limits.block_size * limits.num_blocks
        if longest > capacity:
            message = f"{longest} tokens with the prompt; the KV cache of this worker holds {capacity}"
            raise InvalidRequest("stopping.max_new_tokens", message)

    def _check_mode(self) -> None:
        if self.params.greedy != (self.mode is VerificationMode.GREEDY):
            raise InvalidRequest("mode", f"{self.mode.name} does not go with temperature {self.params.temperature:g}")


def check_tokens(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary. The offending id is not repeated."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequest(field, f"an id is outside the vocabulary of {vocab_size}")
