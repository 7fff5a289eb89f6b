"""One sequence that vLLM runs for a target, and what is said of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import FinishReason

from outrider.options.logprobs import TokenLogprobs
from outrider.protocol.finish import Finish
from outrider.target.opening import Opening, Speculation
from outrider.target.times import Timer
from outrider.vllm.grammar import MaskedGrammar
from outrider.worker.events import SequenceKey

FINISHES = {None: Finish.NONE, FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}
"""vLLM's other reasons are faults."""

_NUMBERS = itertools.count(1)


@dataclass(slots=True, eq=False)
class VllmSequence:
    """Positions count from the first prompt token."""

    key: SequenceKey
    opening: Opening
    timer: Timer
    speculation: Speculation = field(init=False)
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
        self.speculation = self.opening.speculation
        self.request_id = str(next(_NUMBERS))
        self.committed_len = len(self.opening.prompt) + len(self.opening.committed)

    @property
    def decoding(self) -> bool:
        """Whether only its last token is still to be run."""
        return self.answered and self.request.num_tokens - self.request.num_computed_tokens == 1

    def logprobs(self, found: Any) -> Sequence[TokenLogprobs]:
        """Of the tokens of one output, if they were asked for."""
        if found is None or self.opening.logprobs is None:
            return ()
        return _rows(found.logprob_token_ids, found.logprobs, self.opening.logprobs.num_top)

    def prompt_logprobs(self, found: Any) -> Sequence[TokenLogprobs]:
        """Of the prompt's tokens from the second on."""
        if found is None or self.opening.logprobs is None:
            return ()
        return _rows(found.logprob_token_ids, found.logprobs, self.opening.logprobs.num_top)


def _rows(token_ids: Any, logprobs: Any, num_top: int) -> list[TokenLogprobs]:
    """vLLM's rows begin with the token itself."""
    return [
        TokenLogprobs(values[0], tuple(ids[1 : 1 + num_top]), tuple(values[1 : 1 + num_top]))
        for ids, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
