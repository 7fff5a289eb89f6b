"""The drafts of one sequence: what is buffered, what its grammar lets through, and how much of it may be verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from outrider.drafting.buffer import DraftBuffer
from outrider.options.sampling import VerificationMode
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import PLAIN, Speculation
from outrider.target.drafts.calibration import Fit
from outrider.tree import DraftTree


@dataclass(slots=True, eq=False)
class SequenceDrafts:
    tokens: list[int]
    """Prompt and committed output, which the engine extends."""
    speculation: Speculation = PLAIN
    deep: Speculation = PLAIN
    """What sources are told: an engine may need drafts that are longer than its steps."""
    fit: Fit = field(default_factory=Fit)
    """How well they do, compared with those of others."""
    ratio: bool = False
    """Whether one chain with its q is verified by p / q."""
    num_possible: Callable[[list[int]], int] | None = None
    """How many of some drafted tokens a grammar lets through. None: all."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)

    @classmethod
    def of(cls, spec: SequenceSpec, tokens: list[int]) -> Self:
        setting = spec.speculation
        return cls(tokens, setting, setting, ratio=spec.mode is VerificationMode.RATIO)

    @property
    def cap(self) -> int:
        """Most drafted positions in a step."""
        return max(self.speculation.max_draft_tokens, self.speculation.max_own_draft_tokens)

    @property
    def answered(self) -> bool:
        """Whether there is something of a draft worker after the last commit, or it has answered with nothing."""
        return self.buffer.has_answer(len(self.tokens))

    @property
    def waits(self) -> bool:
        """Whether a draft worker owes an answer to the last commit, and there is nothing of it."""
        return self.buffer.active and not self.answered

    @property
    def owed(self) -> bool:
        """Whether a draft worker owes an answer to the last commit, and has answered one that is not long past."""
        num_late = len(self.tokens) - self.buffer.answered_len
        return self.buffer.active and 0 < num_late <= self.deep.max_draft_tokens

    def offer(self, tree: DraftTree) -> None:
        """Buffers what is useful of a draft worker's tree."""
        self.buffer.offer(tree, self.tokens, self.deep.max_draft_tokens)
        self.cut_impossible()

    def put(self, tree: DraftTree) -> None:
        """Buffers what is useful of a tree that was made in this process."""
        self.buffer.put(tree, len(self.tokens), self.deep.max_own_draft_tokens)
        self.cut_impossible()

    def adjust(self, speculation: Speculation, deep: Speculation) -> None:
        self.speculation, self.deep = speculation, deep
        self.buffer.limit(deep.max_draft_tokens, deep.max_own_draft_tokens)

    def advance(self, token_ids: Sequence[int], num_in_step: int) -> None:
        """Follows a commit, in which so many drafted positions were verified."""
        self.buffer.advance(token_ids, num_in_step)
        if self.num_possible is not None:
            self.cut_impossible()

    def cut_impossible(self) -> None:
        """Drops drafted tokens that no grammar lets through, before they cost a row."""
        if self.num_possible is not None and self.buffer.trees:
            self.buffer.keep(self._possible)

    def _possible(self, tree: DraftTree) -> DraftTree:
        assert self.num_possible is not None
        # Ratio mode verifies the first impossible token anyway: it was sampled, and the residual distribution depends
        # on it.
        kept = set[int]()
        for path in tree.paths():
            count = self.num_possible([tree.token_ids[node] for node in path])
            kept.update(path[: count + self.ratio])
        return tree if len(kept) == len(tree) else tree.take(sorted(kept))
