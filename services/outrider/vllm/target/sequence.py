"""One sequence that vLLM runs for a target, and what is said of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import FinishReason

from outrider.options.logprobs import TokenLogprobs
from outrider.sequence.key import Finish
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import Grammar
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.times import Timer
from outrider.vllm.target.grammar import MaskedGrammar
from outrider.worker.events import SequenceKey

FINISHES = {None: Finish.NONE, FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
"""vLLM's other reasons are faults."""

_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False)
class VllmSequence:
    """Positions count from the first prompt token."""

    key: SequenceKey
    spec: SequenceSpec
    timer: Timer
    drafts: SequenceDrafts
    begin: Callable[[VllmSequence, Grammar | None], None]
    """Has vLLM run it."""
    request_id: str = field(init=False)
    """Among vLLM's requests. Never used again: vLLM may still clean up after a request that has ended."""
    request: Any = None
    """vLLM's; None while the grammar is compiled."""
    grammar: MaskedGrammar | None = None
    grammar_s: float = 0.0
    """Time of the threads that compiled its grammar."""
    committed_len: int = field(init=False)
    answered: bool = False
    """Whether tokens were committed since the opening."""

    def __post_init__(self) -> None:
        self.request_id = str(next(_NUMBERS))
        self.committed_len = self.spec.num_tokens

    def take_grammar(self, grammar: Grammar | None) -> None:
        self.begin(self, grammar)

    def grammar_worked(self, seconds: float) -> None:
        self.grammar_s += seconds

    def logprobs(self, found: Any) -> Sequence[TokenLogprobs]:
        """Of the tokens of one output, if they are computed."""
        if found is None or (num_top := self.spec.num_top) is None:
            return ()
        return _rows(found.logprob_token_ids, found.logprobs, num_top)

    def prompt_logprobs(self, found: Any) -> Sequence[TokenLogprobs]:
        """Of the prompt's tokens from the second on."""
        if found is None or self.spec.logprobs is None:
            return ()
        return _rows(found.logprob_token_ids, found.logprobs, self.spec.logprobs.num_top)


def _rows(token_ids: Any, logprobs: Any, num_top: int) -> list[TokenLogprobs]:
    """vLLM's rows begin with the token itself."""
    return [
        TokenLogprobs(values[0], tuple(ids[1 : 1 + num_top]), tuple(values[1 : 1 + num_top]))
        for ids, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
