"""Runs a head over many sequences at once: on the engine, with keys and values in its paged pool, as a model does.

Position i of a head's sequence has the feature of position i of the text, and token i + 1. On a CPU our kernels run its
layers and its rows of the vocabulary, in 8 bits; elsewhere torch does.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.engine import CheckpointError, Engine, EngineConfig, EngineSequence, ModelInfo, OutOfBlocks, Row
from outrider.engine.attention import Attention, KVCache, Shape, make_attention
from outrider.engine.attention.paged import TritonAttention
from outrider.engine.backends import cpu
from outrider.engine.kv.step import Step
from outrider.engine.models.decoder import HeadDecoder
from outrider.engine.models.fused_gpu import can_fuse_on_gpu
from outrider.engine.models.memory import Need, available_bytes, kv_blocks
from outrider.engine.models.taps import HEAD_INPUT
from outrider.engine.run.buckets import make_buckets
from outrider.engine.run.graphs import GraphRecorder, GraphShape
from outrider.heads.decoders import AsLlama, BlockHead, NativeHead, TorchHead, llama_config
from outrider.heads.fused_gpu import GpuHead
from outrider.heads.interface import BlockShape, DraftHead, HeadSettings
from outrider.heads.layer import LayeredHead
from outrider.heads.recorded import OTHERS, ROWS, STEPS, DraftedText, HeadChains, HeadGraphs
from outrider.speculation import Proposal, propose
from outrider.speculation.warm_up import warm_up_proposals

log = logging.getLogger(__name__)

_READ_TOKENS = 256
"""Most tokens of a recorded step that reads. A longer one hides its launches."""


class HeadEngine(Engine):
    """Owned by one thread, as the engine of a model."""

    def __init__(
        self,
        decoder: HeadDecoder,
        cache: KVCache,
        info: ModelInfo,
        config: EngineConfig,
        attention: Attention,
        head: LayeredHead,
    ) -> None:
        super().__init__(decoder, cache, info, config, head.token_map, attention=attention)
        self._head = decoder
        self._width = head.settings.width
        self._chains: HeadChains | None = None

    @torch.inference_mode()
    def record(self, head: LayeredHead, recorder: GraphRecorder, scratch_slot: int) -> None:
        """From now on its steps on a GPU are recorded ones. Raises CheckpointError where they cannot be."""
        attention, info = self._attention, self.info
        assert isinstance(attention, TritonAttention)
        started_s = time.monotonic()
        buckets = make_buckets(ROWS[-1], _READ_TOKENS)
        shape = GraphShape(buckets, head.logits_width, -(-info.max_context_len // info.block_size), scratch_slot)
        weight = head.norm.weight
        features = torch.zeros(_READ_TOKENS, head.settings.width, dtype=weight.dtype, device=weight.device)
        graphs = HeadGraphs(self._head, attention, self._cache, shape, features, recorder)
        chains = HeadChains(self._head, attention, self._cache, shape, features, head.token_map)
        try:
            graphs.capture_all((HEAD_INPUT,))
            chains.record(recorder)
        except RuntimeError as error:
            # As of a model: see there.
            message = f"this head's steps cannot be recorded, turn it off: {error}"
            raise CheckpointError("cuda_graphs", message) from error
        self._graphs, self._chains = graphs, chains
        # Longer drafts are launched step by step, which is slower.
        log.info("recorded drafts of up to %d tokens in %.1f s", STEPS, time.monotonic() - started_s)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """With features of zeros."""
        count = sum(len(row.token_ids) for row in rows)
        return self.forward_head(rows, torch.zeros(count, self._width, device=self._device))[0]

    @torch.inference_mode()
    def warm_up(self) -> None:
        super().warm_up()
        # Drafts that do not fit the recorded steps have their tokens chosen one by one.
        with self._on_device():
            _warm_up_choices(self.try_step(1), self.token_map)

    @torch.inference_mode()
    def forward_head(self, rows: Sequence[Row], features: Tensor) -> tuple[Tensor, Tensor]:
        """features [tokens of all rows, width] → float32 logits and the features of the next step, each [logits wanted,
        …]. The last token of each row is tapped, and has its logits. Raises OutOfBlocks, with nothing changed."""
        self._head.features = features
        if self._graphs is None:
            return self.forward_with_hidden(rows)
        # The next step, which may be a draft's, has the same memory.
        logits, following = self.forward_tapped(rows, (HEAD_INPUT,))
        return logits.clone(), following.clone()

    @torch.inference_mode()
    def draft(self, texts: Sequence[DraftedText], count: int) -> list[list[Proposal]] | None:
        """So many tokens for each. None if they are to be drafted step by step: the steps are not recorded, or do not
        fit."""
        if self._chains is None:
            return None
        try:
            self.kv.allocate([Row(text.kv, [0] * (count - 1), 0) for text in texts if count > 1])
        except OutOfBlocks:
            return None
        if not self._chains.fits(texts, count):
            return None
        with self._on_device():
            self._prepare_cache(Step(wiped=self.kv.take_unclean(), moves=self.kv.take_moves()))
            parts = [texts[at : at + ROWS[-1]] for at in range(0, len(texts), ROWS[-1])]
            return [found for part in parts for found in self._chains.draft(part, count)]


class BlockEngine(HeadEngine):
    """Of a head that fills in whole blocks. Its steps are not recorded."""

    def __init__(self, block: BlockShape, *of_head: Any) -> None:
        super().__init__(*of_head)
        self._block = block

    @torch.inference_mode()
    def warm_up(self) -> None:
        for count in (1, _READ_TOKENS):
            self.try_step(min(count, self.info.max_context_len, self.info.num_blocks * self.info.block_size))
        sequence = self.kv.open([])
        with self._on_device():
            _warm_up_choices(self._fill_in([sequence], [0])[:1], self.token_map)
        self.kv.discard(sequence)

    @torch.inference_mode()
    def draft(self, texts: Sequence[DraftedText], count: int) -> list[list[Proposal]]:
        """Nothing for a text whose block has no room, in the pool or in the context."""
        found: list[list[Proposal]] = [[] for _ in texts]
        numbers, count = self._with_room(texts), min(count, self._block.size - 1)
        # So that logits take no more memory than those of recorded steps would.
        most = max(1, _READ_TOKENS // self._block.size)
        for at in range(0, len(numbers) if count else 0, most):
            part = numbers[at : at + most]
            for number, proposals in zip(part, self._propose([texts[n] for n in part], count), strict=True):
                found[number] = proposals
        return found

    def _propose(self, texts: Sequence[DraftedText], count: int) -> list[list[Proposal]]:
        logits = self._fill_in([text.kv for text in texts], [text.last for text in texts])
        each = [(text, place) for text in texts for place in range(count)]
        proposals = propose(
            logits.view(len(texts), -1, logits.shape[1])[:, :count].flatten(0, 1),
            [text.params for text, _ in each],
            [text.mode for text, _ in each],
            [text.position + place for text, place in each],
            token_map=self.token_map,
            num_others=OTHERS,
        )
        return [proposals[at : at + count] for at in range(0, len(each), count)]

    def _with_room(self, texts: Sequence[DraftedText]) -> list[int]:
        found, free, size = [], self.kv.num_free_blocks, self._block.size
        for number, text in enumerate(texts):
            needed = self.kv.blocks_needed(text.kv, size)
            if needed <= free and text.kv.cached_len + size <= self.info.max_context_len:
                found.append(number)
                free -= needed
        return found

    def _fill_in(self, sequences: Sequence[EngineSequence], known: Sequence[int]) -> Tensor:
        """A block after each of these tokens → the logits of all masks."""
        blocks = self._block.of(known)
        rows = [Row(kv, ids, len(ids) - 1, both_ways=True) for kv, ids in zip(sequences, blocks, strict=True)]
        self._head.features = torch.empty(0)
        return self.forward_with_hidden(rows)[0]


def head_engine(head: DraftHead, config: EngineConfig, context: int) -> HeadEngine | None:
    """Takes the head over: its layers are packed for the kernels where those run. None for a head without layers.
    config.num_blocks: at most.

    Raises CheckpointError where a useful number of blocks does not fit into memory.
    """
    device = torch.device(config.device)
    if not isinstance(head, LayeredHead):
        if device.type == "cuda":
            _warm_up_choices(torch.zeros(1, head.logits_width, device=device), head.token_map)
        return None
    settings = head.settings
    shape = llama_config(settings)
    native = head.block is None and not settings.gated and cpu.why_not_native(config, shape) is None
    dtype = torch.bfloat16 if native else head.norm.weight.dtype
    blocks = _num_blocks(settings, config, context, dtype, head.logits_width)
    cache = KVCache.allocate(
        layers=settings.layers,
        kv_heads=settings.kv_heads,
        # One block more on a GPU, as a model's: see there.
        slots=(blocks + (device.type == "cuda")) * config.block_size,
        head_dim=settings.head_dim,
        dtype=dtype,
        device=device,
    )
    decoder: HeadDecoder
    attention: Attention
    if native:
        kernels = cpu.load_kernels(config.native_variant)
        decoder, attention = NativeHead(head, shape, kernels, context), cpu.NativeAttention(kernels)
    else:
        sizes = Shape(settings.heads, settings.kv_heads, settings.head_dim, config.block_size)
        attention = make_attention(config.attention, sizes, device)
        fused = isinstance(attention, TritonAttention) and not settings.gated and can_fuse_on_gpu(AsLlama(head, shape))
        if head.block is not None:
            decoder = BlockHead(head)
        elif fused:
            decoder = GpuHead(head, AsLlama(head, shape), _whole_blocks(context, config))
        else:
            decoder = TorchHead(head)
    info = ModelInfo(
        head.embed_tokens.num_embeddings,
        context,
        config.block_size,
        blocks,
        str(dtype).removeprefix("torch."),
        config.device,
        decoder.execution,
    )
    parts = (decoder, cache, info, config, attention, head)
    engine = HeadEngine(*parts) if head.block is None else BlockEngine(head.block, *parts)
    if device.type == "cuda":
        if config.cuda_graphs and isinstance(attention, TritonAttention) and head.block is None:
            with torch.cuda.device(device):
                engine.record(head, GraphRecorder(device), blocks * config.block_size)
        engine.warm_up()
    return engine


def _warm_up_choices(logits: Tensor, token_map: Tensor | None) -> None:
    warm_up_proposals(logits, partial(propose, token_map=token_map), OTHERS)


def torch_engine(head: DraftHead, num_blocks: int = 512, *, prefix_cache: bool = True) -> HeadEngine | None:
    """The reference, on a CPU."""
    config = EngineConfig(execution="transformers", num_blocks=num_blocks, prefix_cache=prefix_cache)
    return head_engine(head, config, num_blocks * config.block_size)


def _whole_blocks(context: int, config: EngineConfig) -> int:
    """A draft may go on to the end of the last block."""
    return -(-context // config.block_size) * config.block_size


def _num_blocks(
    settings: HeadSettings, config: EngineConfig, context: int, dtype: torch.dtype, logits_width: int
) -> int:
    block = 2 * settings.layers * settings.kv_heads * settings.head_dim * dtype.itemsize * config.block_size
    free, kind = available_bytes(config.device), torch.device(config.device).type
    # Logits, and those that torch makes in a recorded step before they are where the next ones are too.
    working = 0 if kind == "cpu" else 8 * (_READ_TOKENS + ROWS[-1]) * logits_width
    need = Need(
        "the head", 0, dtype.itemsize, str(dtype), block, -(-context // config.block_size), working_bytes=working
    )
    most = kv_blocks(need, free, kind, blocks=None, kv_bytes=config.kv_cache_bytes)
    return min(most, config.num_blocks or sys.maxsize)
