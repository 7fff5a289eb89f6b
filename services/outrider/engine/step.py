"""One forward's input, laid out flat."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.engine.attention import RowSpan


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
