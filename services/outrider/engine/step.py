"""One forward's input: what each sequence runs, and the same laid out flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.attention import RowSpan
from outrider.engine.sequence import EngineSequence, Sibling


@dataclass(slots=True)
class Row:
    """One sequence's part of a step."""

    sequence: EngineSequence
    token_ids: Sequence[int]
    """Tokens to run, at the positions from sequence.cached_len on. At least one."""
    num_logits: int
    """Logits are returned for this many of the last tokens; 0 in the middle of a prefill."""
    siblings: Sequence[Sibling] = ()
    """Alternatives to tokens of the row; their logits follow those of the row."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_logits <= len(self.token_ids) or not self.token_ids:
            raise ValueError(f"num_logits: {self.num_logits} of {len(self.token_ids)} tokens")
        if any(not 0 <= sibling.after < len(self.token_ids) for sibling in self.siblings):
            raise ValueError(f"siblings: one follows none of {len(self.token_ids)} tokens")


@dataclass(slots=True)
class Step:
    """Rows one after another: token ids, their positions, and the tokens whose logits are wanted."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Flat indices of tokens, ascending."""
    spans: list[RowSpan] = field(default_factory=list)
    wiped: list[int] = field(default_factory=list)
    """Blocks that are zeroed before the step runs."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def longest(self) -> int:
        """Most tokens of one row."""
        return max(span.num_tokens for span in self.spans)
