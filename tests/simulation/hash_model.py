"""A model whose next token is a hash of all earlier ones, on the real engine. The KV cache holds tokens, which the
model reads through the block table: a block that is shared, rewound or freed wrongly changes the text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from outrider.engine import Engine, EngineConfig, ModelInfo
from outrider.engine.attention import KVCache
from outrider.engine.kv.step import Row
from outrider.speculation import Candidate, SamplingParams, VerificationMode
from outrider.tree import DraftTree
from torch import Tensor

from tests.judged import verify

VOCAB_SIZE = 64
_PERIOD = 5
_GENERATOR = torch.Generator().manual_seed(1)
# In each row one token is far likelier, so the greedy choice is known; sampling still has others to choose from.
_DOUBT = 5.0
LOGITS = 6.5 * torch.eye(VOCAB_SIZE) + torch.rand(VOCAB_SIZE, VOCAB_SIZE, generator=_GENERATOR)


def argmax_id(tokens: Sequence[int]) -> int:
    """The model's likeliest token after `tokens`, never 0. Repeats often, so that n-grams find matches."""
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=8).digest()
    if len(tokens) > _PERIOD and digest[0] < 160:
        return max(1, tokens[-_PERIOD] % VOCAB_SIZE)
    return 1 + int.from_bytes(digest[1:], "little") % (VOCAB_SIZE - 1)


def guess(tokens: Sequence[int], accuracy: float) -> int:
    """The proposal of a draft that is right with probability `accuracy`; the same for the same tokens."""
    right = argmax_id(tokens)
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=2, salt=b"draft").digest()
    wrong = int.from_bytes(digest, "little") >= accuracy * 65536
    return 1 + right % (VOCAB_SIZE - 1) if wrong else right


def text(prompt: Sequence[int], count: int, params: SamplingParams, mode: VerificationMode) -> list[int]:
    """The model's text after `prompt`, by plain decoding without an engine. Every answer must equal it."""
    tokens = list(prompt)
    for _ in range(count):
        best = argmax_id(tokens)
        if mode is not VerificationMode.GREEDY:
            plain = Candidate(params, VerificationMode.COUPLED, DraftTree(len(tokens)))
            best = verify(LOGITS[best : best + 1], [plain])[0].token_ids[0]
        tokens.append(best)
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Batch:
    """The layout of the rows and their cache. Has no attention: the decoder reads the cache itself."""

    rows: list[Row]
    slots: list[int]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        raise NotImplementedError


class _Attention:
    def prepare(self, rows: list[Row], cache: KVCache) -> _Batch:
        return _Batch(rows, cast("list[int]", cache))

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None:
        """A token's cell names its position, which is that of its depth wherever its slot is."""
        cells = cast("list[int]", cache)
        for (_, target), cell in zip(moves, [cells[source] for source, _ in moves], strict=True):
            cells[target] = cell


@dataclass(slots=True)
class HashDecoder:
    """Gives the token that `choose` picks for the tokens in the cache, each at its own position."""

    choose: Callable[[Sequence[int]], int] = argmax_id
    before: Callable[[int], None] = lambda num_tokens: None
    """Called before each forward: takes time, or fails."""
    doubt: Callable[[Sequence[int]], int] | None = None
    """The second likeliest token, which is likely enough to be drafted too."""
    execution: str = "hash"
    _known: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Any, taps: Any = None
    ) -> tuple[Tensor, Tensor]:
        tokens, at = token_ids.tolist(), positions.tolist()
        self.before(len(tokens))
        for each in batch.rows:
            for offset, slot in enumerate(each.written_slots()):
                batch.slots[slot] = at[each.start + offset] * VOCAB_SIZE + tokens[each.start + offset]
        wanted = rows.tolist()
        chosen = [self._after(batch, row) for row in wanted]
        logits = LOGITS[[best for best, _ in chosen]]
        if self.doubt is not None:
            for row, (best, second) in enumerate(chosen):
                logits[row, second] += _DOUBT if second != best else 0.0
        return logits, torch.empty(0)

    def _after(self, batch: _Batch, row: int) -> tuple[int, int]:
        chain = next(c for s in batch.rows for c in s.chains() if c.start <= row < c.start + c.num_tokens)
        length = chain.cached_len + row - chain.start + 1
        cells, size = batch.slots, chain.row.block_size
        seen: list[int] = []
        for block in chain.row.blocks[: -(-chain.fork // size)]:
            seen += cells[block * size : (block + 1) * size]
        seen[chain.fork :] = [cells[slot] for slot in chain.path]
        # A cell of a wrong position is out of range and changes the hash.
        key = tuple([cell - at * VOCAB_SIZE for at, cell in enumerate(seen[:length])])
        found = self._known.get(key)
        if found is None:
            tokens = [token % (1 << 32) for token in key]
            best = self.choose(tokens)
            found = self._known[key] = best, best if self.doubt is None else self.doubt(tokens)
        return found


class _Cells(list[int]):
    """A cache of tokens."""

    def wipe(self, blocks: Sequence[int], block_size: int) -> None:
        for block in blocks:
            self[block * block_size : (block + 1) * block_size] = [-1] * block_size


class HashEngine(Engine):
    """The real engine on a cache of tokens."""

    def __init__(self, decoder: HashDecoder, *, num_blocks: int, block_size: int, max_context_len: int) -> None:
        info = ModelInfo(VOCAB_SIZE, max_context_len, block_size, num_blocks, "none", "cpu", "hash", ())
        # -1 is no token at any position, so reading an unwritten cell changes the text.
        cache = cast(KVCache, _Cells([-1] * (num_blocks * block_size)))
        super().__init__(decoder, cache, info, EngineConfig(dtype="float32", block_size=block_size))
        self._attention = _Attention()

    def leaks(self) -> str:
        """The blocks that the pool lacks although no sequence is open; empty if none."""
        pool = self.kv._pool
        held = [block for block, count in enumerate(pool._references) if count]
        if held or pool.num_free != pool.num_blocks:
            return f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks, held: {held[:8]}"
        return ""
