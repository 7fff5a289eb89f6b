"""N-grams where the text repeats itself, the model elsewhere: the default.

Each is strong where the other is weak. Prompt lookup is almost free, so it is tried first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.drafters.config import DrafterKind
from outrider.drafters.interface import Drafter
from outrider.drafters.model import SOURCE as MODEL
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.sequence import DraftSequence
from outrider.drafting.tree import DraftTree
from outrider.speculation import VerificationMode


class CombinedDrafter(Drafter):
    """A match of `ngram`'s min_match tokens or more is continued; the model drafts for all other sequences.

    The model ingests nothing while matches last, and catches up in the first round that needs it.
    """

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        self.info = replace(model.info, kind=DrafterKind.COMBINED)
        self._ngram = ngram
        self._model = model

    def check(self) -> None:
        self._model.check()

    @property
    def num_free_blocks(self) -> int:
        return self._model.num_free_blocks

    def take_prefix_changes(self) -> tuple[list[bytes], list[bytes]]:
        return self._model.take_prefix_changes()

    def on_open(self, sequence: DraftSequence) -> None:
        self._ngram.on_open(sequence)
        self._model.on_open(sequence)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        self._ngram.on_commit(sequence, known_len)
        self._model.on_commit(sequence, known_len)

    def release(self, sequence: DraftSequence) -> None:
        self._ngram.release(sequence)
        self._model.release(sequence)

    def on_close(self, sequence: DraftSequence) -> None:
        self._ngram.on_close(sequence)
        self._model.on_close(sequence)

    def extend(self, sequences: Sequence[DraftSequence]) -> list[DraftTree]:
        return self._model.extend(sequences)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        proposals: list[DraftTree | None] = [self._ngram.look_up(sequence) for sequence in sequences]
        for number, (sequence, found) in enumerate(zip(sequences, proposals, strict=True)):
            if found is not None and not _may_follow(sequence, found):
                proposals[number] = None
        unmatched = [number for number, found in enumerate(proposals) if found is None]
        drafted = self._model.propose([sequences[number] for number in unmatched])
        for number, proposal in zip(unmatched, drafted, strict=True):
            proposals[number] = proposal
        return proposals


def _may_follow(sequence: DraftSequence, found: DraftTree) -> bool:
    """Whether a match may replace what is still valid of the last draft."""
    guess = sequence.guess
    if guess.source != MODEL or not guess.token_ids:
        return True
    # A sampled token must be verified against the q it was sampled from. If a match that begins with it took it over, a
    # later match could replace it before it is verified, and it would be emitted less often than under p.
    if sequence.opening.mode is VerificationMode.RATIO:
        return False
    # The tokens that the target already holds must come first: it is verifying them by now.
    known = guess.guess()
    return found.guess()[: len(known)] == known
