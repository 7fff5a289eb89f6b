"""A graph's inputs: one buffer of integers, filled on the host, sent in one copy, read by every bucket's graph."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.attention.layout import TILE_FIELDS, Fields, fill
from outrider.engine.run.buckets import Bucket
from outrider.engine.run.step import Step

STEP_FIELDS = ("token_ids", "wanted", "tapped")


class StepInputs:
    """Fixed addresses on the device, for steps up to the largest bucket.

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
        blocks = fill(self._numbers, [(step.spans, self._tile_queries)], self._scratch_slot)
        used = self._slices["blocks"].start + blocks
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
