"""CUDA graphs: a decoding or verifying step as one launch.

A step of an 8B model is some three hundred kernels, each with a few microseconds of Python and driver time; replayed as
a graph they cost only device time. Every bucket of `buckets.py` has its graph, and all share inputs and workspace. A
step that fits none, mostly a prefill chunk, runs eagerly, and its kernels are long enough to hide their launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.attention import KVCache
from outrider.engine.attention.layout import TILE_FIELDS, Fields, fill
from outrider.engine.attention.paged import SMALL_SPAN, TritonAttention, TritonBatch
from outrider.engine.kv.step import Step
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.taps import Taps
from outrider.engine.run.buckets import Bucket, choose

log = logging.getLogger(__name__)

# The first run compiles kernels and chooses algorithms, which must not happen while a graph is recorded.
_WARM_UP_RUNS = 2

STEP_FIELDS = ("token_ids", "wanted", "tapped")

Layers = tuple[int, ...]
"""Those whose hidden states are taken, as in Taps. Each set has graphs of its own."""


class StepInputs:
    """One buffer of integers, filled on the host, sent in one copy, read by every bucket's graph. Fixed addresses on
    the device, for steps up to the largest bucket.

    Padding tokens are token 0 at position 0, are written to the scratch slot and attend to nothing. Unused rows of
    logits and of hidden states repeat the first token's.
    """

    def __init__(
        self, buckets: tuple[Bucket, ...], tile_queries: int, max_blocks: int, scratch_slot: int, device: torch.device
    ) -> None:
        """max_blocks: KV blocks of one row's longest context."""
        self._tile_queries = tile_queries
        self._scratch_slot = scratch_slot
        self._fields = Fields.of(
            tokens=max(bucket.tokens for bucket in buckets),
            tiles=max(self.tiles(bucket) for bucket in buckets),
            blocks=max(bucket.rows for bucket in buckets) * max_blocks,
            more=STEP_FIELDS,
        )
        self._slices = self._fields.slices()
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(self._fields.total, dtype=torch.int64, pin_memory=on_gpu)
        self._numbers = {name: self._host.numpy()[at] for name, at in self._slices.items()}
        self._device = torch.zeros(self._fields.total, dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.clear()

    def tiles(self, bucket: Bucket) -> int:
        """Most query tiles of a step in the bucket: a row wastes less than one tile."""
        return bucket.tokens // self._tile_queries + bucket.rows

    def views(self, bucket: Bucket) -> dict[str, Tensor]:
        """The parts of the buffer that the bucket's graph reads."""
        found = {}
        for name, at in self._slices.items():
            lengths = {"blocks": at.stop - at.start} | dict.fromkeys(TILE_FIELDS, self.tiles(bucket))
            found[name] = self._device[at.start : at.start + lengths.get(name, bucket.tokens)]
        return found

    def clear(self) -> None:
        """Sends a step of nothing but padding."""
        self.send(Step())

    def send(self, step: Step) -> None:
        """Starts the copy; kernels launched later on the same stream see the step."""
        if self._sent is not None:
            # The previous copy may still be queued behind earlier steps.
            self._sent.synchronize()
        for name in STEP_FIELDS:
            values = getattr(step, name)
            self._numbers[name][: len(values)] = values
            self._numbers[name][len(values) :] = 0
        blocks = fill(self._numbers, [(step.rows, self._tile_queries)], self._scratch_slot)
        used = self._slices["blocks"].start + blocks
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Recorded(Protocol):
    def replay(self) -> None: ...


class GraphRecorder:
    """Records what is run on a GPU. Graphs of one recorder never run at the same time: their intermediate tensors share
    memory."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Recorded:
        """`run` reads and writes tensors of fixed addresses."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile; only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph


@dataclass(frozen=True, slots=True)
class GraphShape:
    buckets: tuple[Bucket, ...]
    logits_width: int
    max_blocks: int
    """KV blocks of the longest context."""
    scratch_slot: int
    """The slot that padding tokens are written to. No sequence uses it."""


class GraphRunner:
    """A graph for each bucket, captured when it is first needed or all at once by `capture_all`."""

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        cache: KVCache,
        shape: GraphShape,
        device: torch.device,
        recorder: GraphRecorder,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._cache = cache
        self._buckets = shape.buckets
        self._inputs = StepInputs(shape.buckets, attention.tile_queries, shape.max_blocks, shape.scratch_slot, device)
        most = max(bucket.tokens for bucket in shape.buckets)
        self._workspace = attention.workspace(most, cache)
        self._logits = torch.zeros(most, shape.logits_width, dtype=torch.float32, device=device)
        self._states: dict[Layers, Tensor] = {}
        self._graphs: dict[tuple[Bucket, Layers], Recorded] = {}
        self._recorder = recorder

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    def bucket_for(self, step: Step) -> Bucket | None:
        """None when the step is to run eagerly."""
        if not step.rows or step.longest > SMALL_SPAN:
            return None
        return choose(self._buckets, len(step.rows), step.num_tokens)

    def run(self, step: Step, layers: Layers = ()) -> tuple[Tensor, Tensor] | None:
        """float32 logits [wanted, width], and these layers' hidden states as Taps joins them, valid until the next run.

        None when no graph fits.
        """
        bucket = self.bucket_for(step)
        if bucket is None:
            return None
        graph = self._graphs.get((bucket, layers)) or self._capture(bucket, layers)
        self._inputs.send(step)
        graph.replay()
        states = self._states[layers] if layers else self._logits[:0]
        return self._logits[: len(step.wanted)], states[: len(step.tapped)]

    def capture_all(self, layers: Layers = ()) -> None:
        """Captures the largest first: the smaller ones then reuse its memory from the pool."""
        started_s = time.monotonic()
        for bucket in reversed(self._buckets):
            if (bucket, layers) not in self._graphs:
                self._capture(bucket, layers)
        log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started_s)

    def _capture(self, bucket: Bucket, layers: Layers) -> Recorded:
        self._inputs.clear()
        batch = self.batch(bucket)
        graph = self._graphs[bucket, layers] = self._recorder.record(lambda: self.decode(bucket, batch, layers))
        return graph

    def batch(self, bucket: Bucket) -> TritonBatch:
        """The bucket's attention, over the fixed inputs, and the place of its logits."""
        views, tiles = self._inputs.views(bucket), self._inputs.tiles(bucket)
        views["logits"] = self._logits[: bucket.tokens]
        return self._attention.batch(views, self._cache, (tiles,), workspace=self._workspace)

    def decode(self, bucket: Bucket, batch: TritonBatch, layers: Layers) -> None:
        """The computation that the bucket's graph records."""
        views = batch.views
        taps = Taps(layers, views["tapped"]) if layers else None
        logits, _ = self._decoder.forward(views["token_ids"], views["positions"], views["wanted"], batch, taps)
        if logits is not views["logits"]:
            views["logits"].copy_(logits)
        if taps is not None:
            states = taps.joined()
            if layers not in self._states:
                # In the first run, which is not recorded: this memory is not the graphs'.
                self._states[layers] = states.new_zeros(len(self._logits), states.shape[1])
            self._states[layers][: bucket.tokens].copy_(states)
