"""A head's steps on a GPU, recorded: those that read texts, and those that draft beyond them.

A draft step reads the token that was chosen last for each text, and chooses the next one, all on the device. One copy
tells all steps of a proposal where they write and how they choose; one copy brings back what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.engine import EngineSequence
from outrider.engine.attention import KVCache
from outrider.engine.attention.layout import TILE_FIELDS, TOKEN_FIELDS, fill
from outrider.engine.attention.paged import TritonAttention, TritonBatch
from outrider.engine.kv.step import Row, Step
from outrider.engine.models.decoder import HeadDecoder
from outrider.engine.run.buckets import Bucket
from outrider.engine.run.graphs import GraphRecorder, GraphRunner, GraphShape, Layers, Recorded
from outrider.options.sampling import Q_WIDTH, SamplingParams, VerificationMode
from outrider.speculation import Proposal, chained
from outrider.speculation.batched import is_drawn

ROWS = (16, 32, 64)
"""Texts of recorded drafts. Fewer cost as much as the smallest tile of tensor cores."""
STEPS = 8
"""Most tokens of a recorded draft."""
OTHERS = 2
"""Alternatives of each token."""


class HeadGraphs(GraphRunner):
    """Those that read. Every token has a feature, which is on the device already."""

    def __init__(
        self,
        decoder: HeadDecoder,
        attention: TritonAttention,
        cache: KVCache,
        shape: GraphShape,
        features: Tensor,
        recorder: GraphRecorder,
    ) -> None:
        """features: room for those of a step, [tokens, width]."""
        super().__init__(decoder, attention, cache, shape, features.device, recorder)
        self._head, self._features = decoder, features

    def run(self, step: Step, layers: Layers = ()) -> tuple[Tensor, Tensor] | None:
        if self.bucket_for(step) is not None:
            self._features[: step.num_tokens].copy_(self._head.features)
        return super().run(step, layers)

    def decode(self, bucket: Bucket, batch: TritonBatch, layers: Layers) -> None:
        self._head.features = self._features[: bucket.tokens]
        super().decode(bucket, batch, layers)


@dataclass(frozen=True, slots=True)
class DraftedText:
    """A text that is drafted for, and where the head is in it."""

    kv: EngineSequence
    params: SamplingParams
    mode: VerificationMode
    position: int
    """Of the first token of the draft."""
    logits: Tensor
    """[1, logits width]"""
    feature: Tensor
    """[1, width]"""
    last: int
    """The token before the draft."""


class HeadChains:
    """Those that draft, for so many texts each."""

    def __init__(
        self,
        decoder: HeadDecoder,
        attention: TritonAttention,
        cache: KVCache,
        shape: GraphShape,
        features: Tensor,
        token_map: Tensor | None,
    ) -> None:
        """features: room for those of the most texts."""
        self.max_blocks, self.logits_width, self.scratch_slot = shape.max_blocks, shape.logits_width, shape.scratch_slot
        self.attention, self.cache, self.token_map = attention, cache, token_map
        self.features, device = features, features.device
        self.logits = torch.zeros(ROWS[-1], shape.logits_width, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(ROWS[-1], dtype=torch.int64, device=device)
        self.places = torch.arange(ROWS[-1], device=device)
        self.workspace = attention.workspace(ROWS[-1], cache)
        self._decoder = decoder
        self._steps = {rows: _Steps(self, rows) for rows in ROWS}

    def record(self, recorder: GraphRecorder) -> None:
        for steps in reversed(self._steps.values()):
            steps.record(recorder)

    def fits(self, texts: Sequence[DraftedText], count: int) -> bool:
        return count <= STEPS and all(len(text.kv.blocks) <= self.max_blocks for text in texts)

    def draft(self, texts: Sequence[DraftedText], count: int) -> list[list[Proposal]]:
        """So many tokens for each of at most ROWS[-1] texts, whose sequences have the blocks for all but the last."""
        steps = next(steps for rows, steps in self._steps.items() if rows >= len(texts))
        torch.cat([text.logits for text in texts], out=self.logits[: len(texts)])
        torch.cat([text.feature for text in texts], out=self.features[: len(texts)])
        params, modes = [text.params for text in texts], [text.mode for text in texts]
        positions = [text.position for text in texts]
        found = steps.run(texts, params, modes, positions, count)
        of_steps = chained.proposals(found, params, modes, positions, steps.num_others)
        return [list(of_text) for of_text in zip(*of_steps, strict=True)]

    def read(self, rows: int, batch: TritonBatch) -> None:
        """The tokens that were chosen."""
        self._decoder.features = self.features[:rows]
        tokens, places = self.tokens[:rows], self.places[:rows]
        logits, following = self._decoder.forward(tokens, batch.views["positions"], places, batch)
        if logits is not batch.views["logits"]:
            batch.views["logits"].copy_(logits)
        self.features[:rows].copy_(following)


class _Steps:
    """For a number of rows: the inputs of all steps of a proposal, of which one is in the place that graphs read."""

    def __init__(self, chains: HeadChains, rows: int) -> None:
        self._chains, self._rows = chains, rows
        self.num_others = min(OTHERS, chains.logits_width - 1)
        device = chains.logits.device
        counts = dict.fromkeys((*TOKEN_FIELDS, *TILE_FIELDS), 1) | chained.COLUMNS
        ends = np.cumsum([count * rows for count in counts.values()]).tolist()
        self._slices = {name: slice(start, end) for name, start, end in zip(counts, [0, *ends], ends, strict=False)}
        self._size, self._blocks = ends[-1], STEPS * ends[-1]
        total = self._blocks + rows * chains.max_blocks
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        self._current = torch.zeros(self._size, dtype=torch.int64, device=device)
        views = {name: self._current[at] for name, at in self._slices.items()} | {
            "blocks": self._device[self._blocks :],
            "logits": chains.logits[:rows],
        }
        self._batch = chains.attention.batch(views, chains.cache, (rows,), workspace=chains.workspace)
        of_guess = 3 + 2 * self.num_others
        widths = {False: of_guess, True: of_guess + 2 * min(Q_WIDTH, chains.logits_width)}
        # By whether any row may be drawn.
        self._found = {drawn: self.chosen(width) for drawn, width in widths.items()}
        self._results = {drawn: torch.stack([found] * STEPS) for drawn, found in self._found.items()}
        self._graphs: dict[bool, tuple[Recorded, Recorded]] = {}

    def chosen(self, width: int) -> Tensor:
        return torch.zeros(self._rows, width, dtype=torch.float64, device=self._current.device)

    def record(self, recorder: GraphRecorder) -> None:
        # Rows of padding only.
        self._fill(0, [], [], [], [])
        self._device.copy_(self._host)
        self._current.copy_(self._device[: self._size])
        for drawn in self._found:
            first, later = partial(self._choose, drawn), partial(self._grow, drawn)
            self._graphs[drawn] = recorder.record(first), recorder.record(later)

    def run(
        self,
        texts: Sequence[DraftedText],
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
        count: int,
    ) -> Tensor:
        """What is chosen, [count, texts, …], on the host."""
        # Its last copy has been waited for, with what came back.
        used = [self._fill(number, texts, params, modes, positions) for number in range(count)][-1]
        self._device[: self._blocks + used].copy_(self._host[: self._blocks + used], non_blocking=True)
        drawn = any(map(is_drawn, params, modes))
        first, later = self._graphs[drawn]
        for number in range(count):
            self._current.copy_(self._device[number * self._size : (number + 1) * self._size])
            (later if number else first).replay()
            self._results[drawn][number].copy_(self._found[drawn])
        return self._results[drawn][:count].cpu()[:, : len(texts)]

    def _fill(
        self,
        number: int,
        texts: Sequence[DraftedText],
        params: Sequence[SamplingParams],
        modes: Sequence[VerificationMode],
        positions: Sequence[int],
    ) -> int:
        """Lays out a step. The first one reads nothing. Returns how many blocks the texts have."""
        numbers = self._host.numpy()
        section = numbers[number * self._size : (number + 1) * self._size]
        views = {name: section[at] for name, at in self._slices.items()} | {"blocks": numbers[self._blocks :]}
        at = [position + number for position in positions]
        chained.lay_out(views, params, modes, at, self._chains.logits_width)
        rows, size = list[Row](), self._chains.attention.shape.block_size
        for place, text in enumerate(texts if number else ()):
            rows.append(row := Row(text.kv, (0,), 0))
            row.lay_out(place, size)
            # The steps before it are cached by then, and all steps have the same list of blocks.
            row.kv_len, row.blocks = text.kv.cached_len + number, text.kv.blocks
        group = rows, self._chains.attention.tile_queries
        return fill(views, [group], self._chains.scratch_slot)

    def _grow(self, drawn: bool) -> None:
        self._chains.read(self._rows, self._batch)
        self._choose(drawn)

    def _choose(self, drawn: bool) -> None:
        chains, views = self._chains, self._batch.views
        logits = chains.logits[: self._rows]
        found = chained.choose_next(logits, views, chains.token_map, self.num_others, drawn=drawn)
        chains.tokens[: self._rows].copy_(found[:, 1])
        self._found[drawn].copy_(found)
