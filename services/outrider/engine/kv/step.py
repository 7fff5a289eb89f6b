"""One forward's input: what each sequence runs, and the same laid out flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.attention import RowSpan
from outrider.engine.attention.tree import depths
from outrider.engine.kv.sequence import DraftedNodes, EngineSequence


@dataclass(slots=True)
class Row:
    """One sequence's part of a step."""

    sequence: EngineSequence
    token_ids: Sequence[int]
    """Tokens to run, at the positions from sequence.cached_len on. At least one."""
    num_logits: int
    """Logits are returned for this many of the last tokens, in their order; 0 in the middle of a prefill."""
    parents: Sequence[int] = ()
    """For each of the last tokens, the drafted tree: which of these it follows, or -1 for the token before them all.
    They are dropped after the step unless KVCacheManager.keep takes them. Without, all tokens are a chain and stay."""
    num_tapped: int = field(default=0, kw_only=True)
    """Hidden states are returned for this many of the last tokens, by Engine.forward_tapped."""
    nodes: DraftedNodes | None = field(default=None, init=False)
    """The tree, as it is laid out."""
    num_chain_tokens: int = field(init=False)
    """Tokens before the drafted tree."""

    def __post_init__(self) -> None:
        self.num_chain_tokens = len(self.token_ids) - len(self.parents)
        if not 0 <= self.num_logits <= len(self.token_ids) or not self.token_ids:
            raise ValueError(f"num_logits: {self.num_logits} of {len(self.token_ids)} tokens")
        if not 0 <= self.num_tapped <= len(self.token_ids):
            raise ValueError(f"num_tapped: {self.num_tapped} of {len(self.token_ids)} tokens")
        if self.parents:
            if self.num_chain_tokens < 0:
                raise ValueError(f"parents: {len(self.parents)} for {len(self.token_ids)} tokens")
            self.nodes = DraftedNodes.of(self.token_ids[self.num_chain_tokens :], self.parents)


@dataclass(slots=True)
class Step:
    """Rows one after another: token ids, their positions, and the tokens whose logits are wanted."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Flat indices of tokens, in the order of their logits."""
    spans: list[RowSpan] = field(default_factory=list)
    wiped: list[int] = field(default_factory=list)
    """Blocks that are zeroed before the step runs."""
    moves: list[tuple[int, int]] = field(default_factory=list)
    """Slots whose keys and values are moved before that: from, to."""
    tapped: list[int] = field(default_factory=list)
    """Flat indices of tokens, in the order of their hidden states."""

    adapters: list[int] = field(default_factory=list)
    """Of each token: the number of its sequence's adapter, or -1."""

    def add(self, row: Row, block_size: int) -> None:
        """Adds a row whose sequence has the blocks for it."""
        start, count, cached = len(self.token_ids), len(row.token_ids), len(row.sequence.tokens)
        length = cached + count
        span = RowSpan(start, count, length, row.sequence.blocks[: -(-length // block_size)], block_size)
        self.spans.append(span)
        self.token_ids.extend(row.token_ids)
        self.adapters.extend([row.sequence.adapter] * count)
        self.positions.extend(range(cached, length))
        at: Sequence[int] = range(start, start + count)
        if row.nodes is not None and row.nodes.branching:
            self._branch(row.nodes, span)
            first = row.num_chain_tokens
            at = [*at[:first], *(at[first + place] for place in row.nodes.places)]
        self.wanted.extend(at[count - row.num_logits :])
        if row.num_tapped:
            self.tapped.extend(at[count - row.num_tapped :])

    def _branch(self, nodes: DraftedNodes, span: RowSpan) -> None:
        """Lays the last row's drafted tokens out depth first: two of one depth are at one position."""
        span.parents = nodes.placed_parents()
        count = len(span.parents)
        first = self.num_tokens - count
        self.token_ids[first:] = [nodes.token_ids[node] for node in nodes.order]
        self.positions[first:] = [span.kv_len - count + depth for depth in depths(span.parents)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def longest(self) -> int:
        """Most tokens of one row."""
        return max(span.num_tokens for span in self.spans)
