"""Between the token ids of sequences, which are the target's, and those that a draft model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.drafters.sequence import DraftSequence
from outrider.speculation import Proposal, SamplingParams, VerificationMode, propose


class Vocabulary(Protocol):
    size: int
    """Token ids of sequences are below this."""

    def open(self, sequence: DraftSequence) -> None:
        """The sequence begins."""
        ...

    def commit(self, sequence: DraftSequence, known_len: int) -> int:
        """The committed tokens have grown beyond `known_len`. Returns how many ids at the head of `text` stay as they
        were."""
        ...

    def close(self, sequence: DraftSequence) -> None: ...

    def text(self, sequence: DraftSequence) -> Sequence[int]:
        """The committed tokens, as the model reads them."""
        ...

    def whole(self, sequence: DraftSequence) -> bool:
        """Whether `text` ends where the committed tokens end."""
        ...

    def ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Proposed tokens, as the model reads them."""
        ...

    def propose(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
        num_others: int,
    ) -> list[Proposal]:
        """As speculation.propose, from the model's logits: tokens of the target."""
        ...


class OwnVocabulary:
    """The model has its target's token ids."""

    def __init__(self, size: int, num_tokens: int | None = None, token_map: Tensor | None = None) -> None:
        """`num_tokens`: logits beyond are padding, which is never proposed. `token_map`: the token id of each logit."""
        self.size = size
        # The head of a draft that was distilled has its own list of tokens.
        self._num_logits = num_tokens if token_map is None else None
        self._token_map = token_map

    def open(self, sequence: DraftSequence) -> None: ...

    def commit(self, sequence: DraftSequence, known_len: int) -> int:
        return known_len

    def close(self, sequence: DraftSequence) -> None: ...

    def text(self, sequence: DraftSequence) -> Sequence[int]:
        return sequence.tokens

    def whole(self, sequence: DraftSequence) -> bool:
        return True

    def ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids

    def propose(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
        num_others: int,
    ) -> list[Proposal]:
        shown = logits[:, : self._num_logits]
        return propose(shown, params, modes, positions, token_map=self._token_map, num_others=num_others)
