"""The bounds of a target, against which every message is checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidRequest, NotSupported
from outrider.sequence.spec import SequenceSpec
from outrider.target.grammars.grammar import GrammarCompiler


@dataclass(frozen=True, slots=True)
class Limits:
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

    def check(self, spec: SequenceSpec) -> None:
        """Raises InvalidRequest when this worker could never serve it to the end."""
        spec.check(self.vocab_size, self.max_context_len)
        spec.speculation.check(self.max_draft_tokens)
        longest = min(len(spec.prompt) + spec.max_new_tokens, self.max_context_len)
        capacity = self.block_size * self.num_blocks
        if longest > capacity:
            message = f"{longest} tokens with the prompt; the KV cache of this worker holds {capacity}"
            raise InvalidRequest("stopping.max_new_tokens", message)
        if spec.has_grammar and self.grammars is None:
            raise NotSupported("logits.grammar", "structured output is not served by this target")
