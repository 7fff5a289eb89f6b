"""Each sequence's share of the KV cache; and one forward's input: what each runs, and the same laid out flat."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.engine.kv.tree import branches, check_parents, depth_first, depths, path_to, runs


class OutOfBlocks(Exception):
    """The KV pool has too few free blocks. Nothing was changed; free some and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {free} free")
        self.needed = needed
        self.free = free


@dataclass(slots=True, eq=False)
class EngineSequence:
    """Tokens whose keys and values are cached, and the blocks that hold them."""

    salt: bytes = b""
    tokens: list[int] = field(default_factory=list)
    """Token ids with KV in the cache, from position 0."""
    blocks: array[int] = field(default_factory=lambda: array("q"))
    """Block ids, in order of position. A step copies all of them to its layout, which from an array is much faster."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the blocks published so far; always a prefix of `blocks`."""
    adapter: int = -1
    """Its number in `Engine.adapt`; -1: none."""
    row: Row | None = None
    """That of the last forward, with the tree of which nodes are kept or dropped now."""

    @property
    def cached_len(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Row:
    """One sequence's part of a step; once it is laid out, its tokens in the flat batch and the blocks of its KV too."""

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
    both_ways: bool = field(default=False, kw_only=True)
    """Its tokens, which are a chain, also see those that come after them."""
    num_chain_tokens: int = field(init=False)
    """Tokens before the drafted tree."""

    order: Sequence[int] = field(default=(), init=False)
    """Of a tree that branches: its nodes depth first, as they are laid out."""
    places: Sequence[int] = field(default=(), init=False)
    """Each node's place in that order: its KV is so many slots behind the tokens before the tree."""
    tree: Sequence[int] = field(default=(), init=False)
    """Of the node at each place: its parent's place, or -1. Without, the tokens are a chain."""
    start: int = field(default=0, init=False)
    """Index of its first token in the flat batch."""
    kv_len: int = field(default=0, init=False)
    """Cached positions after this step, including its own tokens."""
    blocks: Sequence[int] = field(default=(), init=False)
    """The blocks of its kv_len positions, in order. Slots of the last one beyond kv_len must not be read."""
    block_size: int = field(default=0, init=False)
    _slots: list[int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        parents, self.num_chain_tokens = self.parents, len(self.token_ids) - len(self.parents)
        if not 0 <= self.num_logits <= len(self.token_ids) or not self.token_ids:
            raise ValueError(f"num_logits: {self.num_logits} of {len(self.token_ids)} tokens")
        if not 0 <= self.num_tapped <= len(self.token_ids):
            raise ValueError(f"num_tapped: {self.num_tapped} of {len(self.token_ids)} tokens")
        if self.num_chain_tokens < 0:
            raise ValueError(f"parents: {len(parents)} for {len(self.token_ids)} tokens")
        if parents and branches(parents):
            check_parents(parents)
            self.order = depth_first(parents)
            self.places = places = [0] * len(parents)
            for place, node in enumerate(self.order):
                places[node] = place
            self.tree = [places[parents[node]] if parents[node] >= 0 else -1 for node in self.order]

    def lay_out(self, start: int, block_size: int) -> None:
        """Once its sequence has the blocks for it."""
        self.start, self.block_size, self._slots = start, block_size, None
        self.kv_len = len(self.sequence.tokens) + len(self.token_ids)
        self.blocks = self.sequence.blocks[: -(-self.kv_len // block_size)]

    def drafted(self, path: Sequence[int]) -> list[int]:
        """The tokens of these nodes. Raises ValueError unless each follows the one before it, and the first none."""
        before = -1
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != before:
                raise ValueError(f"path: {list(path)} is none of the drafted tree {list(self.parents)}")
            before = node
        return [self.token_ids[self.num_chain_tokens + node] for node in path]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cached_len(self) -> int:
        """Positions cached before this step."""
        return self.kv_len - len(self.token_ids)

    @property
    def slots(self) -> list[int]:
        """One slot per position of its blocks; at least kv_len slots."""
        if self._slots is None:
            size = self.block_size
            self._slots = [slot for block in self.blocks for slot in range(block * size, (block + 1) * size)]
        return self._slots

    def slot(self, position: int) -> int:
        """The slot of a chain's token at this position."""
        number, offset = divmod(position, self.block_size)
        return self.blocks[number] * self.block_size + offset

    def chains(self) -> list[Chain]:
        """The row as chains: its tokens up to the first branch, and each branch of a tree."""
        if not self.tree:
            return [Chain(self, self.start, self.num_tokens, self.kv_len)]
        first_node = self.kv_len - len(self.tree)
        first, *others = runs(self.tree)
        trunk = self.num_tokens - len(self.tree) + len(first)
        return [
            Chain(self, self.start, trunk, self.cached_len + trunk),
            *(self._branch(first_node, nodes) for nodes in others),
        ]

    def _branch(self, first_node: int, nodes: range) -> Chain:
        path = [*path_to(self.tree, self.tree[nodes[0]]), *nodes]
        # Nodes that lie where a chain's would are read with the positions before them.
        fork = next(place for place, node in enumerate(path) if node != place)
        slots = [self.slot(first_node + node) for node in path[fork:]]
        start = self.start + self.num_tokens - len(self.tree) + nodes[0]
        return Chain(self, start, len(nodes), first_node + len(path), slots)

    def written_slots(self) -> list[int]:
        """The slots that its own tokens are written to. The cost does not depend on the cached positions."""
        blocks, size = self.blocks, self.block_size
        return [blocks[at // size] * size + at % size for at in range(self.cached_len, self.kv_len)]

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order. Checks all blocks, because they may be permuted."""
        return self.slots == list(range(self.slots[0], self.slots[0] + len(self.slots)))


class Chain(NamedTuple):
    """Tokens of a row that follow one another, at consecutive positions."""

    row: Row
    start: int
    """Index of its first token in the flat batch."""
    num_tokens: int
    kv_len: int
    """Positions that its last token sees."""
    path: Sequence[int] = ()
    """The slots of the last positions, where a tree has them elsewhere than a chain would."""

    @property
    def cached_len(self) -> int:
        """Positions before its own tokens."""
        return self.kv_len - self.num_tokens

    @property
    def fork(self) -> int:
        """The positions before this one are read from the row's blocks, in order."""
        return self.kv_len - len(self.path)

    @property
    def slots(self) -> list[int]:
        return [*self.row.slots[: self.fork], *self.path]

    @property
    def contiguous(self) -> bool:
        """Whether the slots are consecutive, in order."""
        return not self.path and self.row.contiguous


@dataclass(slots=True)
class Step:
    """Rows one after another: token ids, their positions, and the tokens whose logits are wanted."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """Flat indices of tokens, in the order of their logits."""
    rows: list[Row] = field(default_factory=list)
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
        start, count = len(self.token_ids), len(row.token_ids)
        row.lay_out(start, block_size)
        self.rows.append(row)
        self.token_ids.extend(row.token_ids)
        self.adapters.extend([row.sequence.adapter] * count)
        self.positions.extend(range(row.kv_len - count, row.kv_len))
        at: Sequence[int] = range(start, start + count)
        if row.tree:
            self._branch(row)
            first = row.num_chain_tokens
            at = [*at[:first], *(at[first + place] for place in row.places)]
        self.wanted.extend(at[count - row.num_logits :])
        if row.num_tapped:
            self.tapped.extend(at[count - row.num_tapped :])

    def _branch(self, row: Row) -> None:
        """Lays the last row's drafted tokens out depth first: two of one depth are at one position."""
        count = len(row.tree)
        first = self.num_tokens - count
        self.token_ids[first:] = [row.token_ids[row.num_chain_tokens + node] for node in row.order]
        self.positions[first:] = [row.kv_len - count + depth for depth in depths(row.tree)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def longest(self) -> int:
        """Most tokens of one row."""
        return max(row.num_tokens for row in self.rows)
