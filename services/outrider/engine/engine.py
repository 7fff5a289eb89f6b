"""The engine: sequences in, logits out. Owned by one thread.

It keeps keys and values for the tokens it is given, and nothing else: the caller decides which tokens are committed and
which come next. A rewind only lowers a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.engine.attention import Attention, KVCache, RowSpan, SdpaAttention
from outrider.engine.blocks import BlockPool, PrefixChanges
from outrider.engine.buckets import choose
from outrider.engine.config import EngineConfig
from outrider.engine.decoder import Decoder
from outrider.engine.memory import held_bytes
from outrider.engine.sequence import EngineSequence, OutOfBlocks, Sibling, SiblingKV
from outrider.engine.step import Step
from outrider.prefix import block_hashes

if TYPE_CHECKING:
    from outrider.engine.graphs import GraphRunner
    from outrider.engine.parallel.group import Group


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model."""

    vocab_size: int
    """Token ids are below this. Logits may cover fewer tokens: see Engine.token_map."""
    max_context_len: int
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    execution: str
    """Implementation of a step, as in Decoder. Another one rounds differently, and may continue a text differently."""
    eos_token_ids: tuple[int, ...]


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


class Engine:
    """A decoder, its KV cache, and the prefix cache over it."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        info: ModelInfo,
        config: EngineConfig,
        token_map: Tensor | None = None,
        *,
        attention: Attention | None = None,
        graphs: GraphRunner | None = None,
        group: Group | None = None,
    ) -> None:
        self.info = info
        self.token_map = token_map
        """[logits width] int64: the token id of each logit, or None when logits cover the vocabulary."""
        self._decoder = decoder
        self._cache = cache
        self._config = config
        self._device = torch.device(config.device)
        self._attention = attention or SdpaAttention()
        self._graphs = graphs
        self._group = group
        self._pool = BlockPool(info.num_blocks)
        self._unclean: list[int] = []
        """Blocks to be zeroed before the next step. A group's followers zero theirs in the same step."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be allocated now, including those of evictable prefixes."""
        return self._pool.num_free

    @property
    def runs_siblings(self) -> bool:
        """Whether siblings are worth running. They need copies, which CUDA graphs lack, and a step without a graph
        costs more."""
        return self._graphs is None

    def num_free_tokens(self, num_rows: int, num_tokens: int) -> int:
        """How many more tokens a recorded step of this many sequences and tokens would run in the same time."""
        if self._graphs is None:
            return 0
        bucket = choose(self._graphs.buckets, num_rows, num_tokens)
        return 0 if bucket is None else bucket.tokens - num_tokens

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks of cached prefixes that were evicted, since the start."""
        return self._pool.num_evicted

    @property
    def weight_bytes(self) -> int:
        """Memory of the model as it is run, including its tables."""
        return held_bytes(self._decoder)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position, over all layers."""
        cache = self._cache
        return sum(int(t.shape[0] * t.shape[2]) * t.element_size() for t in [*cache.keys, *cache.values])

    def blocks_needed(self, sequence: EngineSequence, num_new_tokens: int) -> int:
        """Blocks that running `num_new_tokens` more would take from the pool."""
        total = -(-(sequence.cached_len + num_new_tokens) // self.info.block_size)
        return max(0, total - len(sequence.blocks))

    def open(self, prompt: Sequence[int], salt: bytes = b"") -> EngineSequence:
        """A sequence that starts with the cached prefix of `prompt`, at most all but its last token."""
        sequence = EngineSequence(salt=salt)
        if self._config.prefix_cache:
            size = self.info.block_size
            hashes = block_hashes(prompt[: (len(prompt) - 1) // size * size], size, salt)
            sequence.blocks = self._pool.find(hashes)
            sequence.hashes = hashes[: len(sequence.blocks)]
            sequence.tokens = list(prompt[: len(sequence.blocks) * size])
        return sequence

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Runs the rows as one flat batch → float32 [logits wanted, logits width], valid until the next forward.

        Raises OutOfBlocks, with nothing changed, when the pool cannot hold them.
        """
        step = self._lay_out(rows)
        with self._on_device():
            self._cache.wipe(step.wiped, self.info.block_size)
            logits = self._graphs.run(step) if self._graphs is not None else None
            if logits is None:
                logits, _ = self._run(step)
        self._advance(rows)
        return logits

    def forward_with_hidden(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """As forward, also with the head's inputs, [logits wanted, width], from which distillation learns."""
        step = self._lay_out(rows)
        out = self.run(step)
        self._advance(rows)
        return out

    def run(self, step: Step) -> tuple[Tensor, Tensor]:
        """Runs a step that is laid out already → logits and the head's inputs. Followers call it with rank 0's
        steps."""
        with self._on_device():
            self._cache.wipe(step.wiped, self.info.block_size)
            return self._run(step)

    def _lay_out(self, rows: Sequence[Row]) -> Step:
        self._reserve(rows)
        step = Step(wiped=self._unclean)
        self._unclean = []
        for row in rows:
            start, count, cached = step.num_tokens, len(row.token_ids), row.sequence.cached_len
            step.token_ids.extend(row.token_ids)
            step.positions.extend(range(cached, cached + count))
            step.wanted.extend(range(start + count - row.num_logits, start + count))
            step.spans.append(self._span(row.sequence, start, count))
            for number, sibling in enumerate(row.sequence.siblings, start=1):
                step.wanted.append(step.num_tokens)
                step.spans.append(self._sibling_span(row.sequence, sibling, step.num_tokens, number))
                step.token_ids.append(sibling.token_id)
                step.positions.append(sibling.position)
        return step

    def _run(self, step: Step) -> tuple[Tensor, Tensor]:
        with self._group.run(step) if self._group is not None else nullcontext():
            batch = self._attention.prepare(step.spans, self._cache)
            ids, at, wanted = (
                torch.tensor(x, dtype=torch.int64, device=self._device)
                for x in (step.token_ids, step.positions, step.wanted)
            )
            return self._decoder.forward(ids, at, wanted, batch)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes our GPU the thread's current device, on which kernels are launched; the default is the first GPU."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    @staticmethod
    def _advance(rows: Sequence[Row]) -> None:
        for row in rows:
            row.sequence.tokens.extend(row.token_ids)

    def accept_branch(self, sequence: EngineSequence, number: int) -> None:
        """Continues with sibling `number` of the last forward: it replaces the row's tokens from its position on."""
        sibling = sequence.siblings.pop(number)
        at = sibling.position // self.info.block_size
        del sequence.tokens[sibling.position :]
        sequence.tokens.append(sibling.token_id)
        self._pool.release(sequence.blocks[at:])
        sequence.blocks[at:] = [sibling.block]

    def rewind(self, sequence: EngineSequence, length: int) -> None:
        """Drops the cached tokens from position `length` on, and all siblings.

        A published block is never written again, so a rewind into one drops all of it:
        cached_len may end lower.
        """
        self._drop_siblings(sequence)
        size = self.info.block_size
        published = len(sequence.hashes)
        if length < published * size:
            published = length // size
            length = published * size
            del sequence.hashes[published:]
        if length >= sequence.cached_len:
            return
        del sequence.tokens[length:]
        keep = -(-length // size)
        self._pool.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]

    def retract(self, sequence: EngineSequence, length: int) -> None:
        """As rewind, after a failed step. Released blocks may hold NaN, and are zeroed before the next step."""
        held = [*sequence.blocks, *(sibling.block for sibling in sequence.siblings)]
        own = {block for block in held if not self._pool.is_shared(block)}
        self.rewind(sequence, length)
        self._unclean.extend(own.difference(sequence.blocks))

    def discard(self, sequence: EngineSequence) -> None:
        """As close, for a sequence that failed: blocks that only it holds are unpublished and zeroed."""
        self._unclean.extend(self._pool.forget(sequence.blocks))
        self._unclean.extend(sibling.block for sibling in sequence.siblings)
        self.close(sequence)

    def publish(self, sequence: EngineSequence, committed_len: int) -> None:
        """Lets other sequences find the blocks that lie wholly below `committed_len`."""
        size = self.info.block_size
        done = len(sequence.hashes)
        full = min(committed_len, sequence.cached_len) // size
        if not self._config.prefix_cache or full <= done:
            return
        parent = sequence.hashes[-1] if sequence.hashes else None
        fresh = block_hashes(sequence.tokens[done * size : full * size], size, sequence.salt, parent=parent)
        for block, block_hash in zip(sequence.blocks[done:full], fresh, strict=True):
            self._pool.publish(block, block_hash)
        sequence.hashes.extend(fresh)

    def close(self, sequence: EngineSequence) -> None:
        """Releases the sequence's blocks; published ones stay findable until they are evicted."""
        self._drop_siblings(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.hashes = []
        sequence.tokens = []

    def take_prefix_changes(self) -> PrefixChanges:
        """Hashes that became findable or were evicted since the last call."""
        return self._pool.take_changes()

    def _reserve(self, rows: Sequence[Row]) -> None:
        needs = [self.blocks_needed(row.sequence, len(row.token_ids)) for row in rows]
        needed = sum(needs) + sum(len(row.siblings) for row in rows)
        if needed > self._pool.num_free:
            raise OutOfBlocks(needed, self._pool.num_free)
        for row, count in zip(rows, needs, strict=True):
            sequence = row.sequence
            blocks = sequence.blocks
            blocks.extend(self._pool.allocate(count, after=blocks[-1] if blocks else None))
            self._drop_siblings(sequence)
            for sibling, block in zip(row.siblings, self._pool.allocate(len(row.siblings)), strict=True):
                position = sequence.cached_len + sibling.after + 1
                sequence.siblings.append(SiblingKV(position, sibling.token_id, block))

    def _drop_siblings(self, sequence: EngineSequence) -> None:
        self._pool.release([sibling.block for sibling in sequence.siblings])
        sequence.siblings.clear()

    def _span(self, sequence: EngineSequence, start: int, count: int) -> RowSpan:
        length, size = sequence.cached_len + count, self.info.block_size
        return RowSpan(start, count, length, sequence.blocks[: -(-length // size)], size)

    def _sibling_span(self, sequence: EngineSequence, sibling: SiblingKV, start: int, beside: int) -> RowSpan:
        size = self.info.block_size
        at, offset = divmod(sibling.position, size)
        blocks = [*sequence.blocks[:at], sibling.block]
        copied = sequence.blocks[at] if offset else None
        return RowSpan(start, 1, sibling.position + 1, blocks, size, beside=beside, copied_block=copied)


__all__ = ["Engine", "ModelInfo", "OutOfBlocks", "Row", "Sibling"]
