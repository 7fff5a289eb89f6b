"""What a target does for a head that draft workers hold: it computes the features that the head reads, and sends them
in commits instead of drafting itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.drafting.heads.interface import DraftHead
from outrider.drafting.source import CloseReason, DraftAssignment, DraftLimits, Features, SourceOpening
from outrider.drafting.tree import DraftTree
from outrider.errors import OutriderError
from outrider.protocol.sequence_key import SequenceKey

_MAX_BYTES = 256 << 10
"""Of one message: the features of a long prompt come in several."""


class HeadFeatures:
    """A DraftSource that is shown the target's states and proposes nothing."""

    def __init__(self, head: DraftHead) -> None:
        self.name = head.kind
        self.taps = head.taps
        self._head = head
        self._seen: dict[SequenceKey, list[Features]] = {}

    def open(self, key: SequenceKey, opening: SourceOpening, assignment: DraftAssignment | None = None) -> None: ...
    def commit(self, key: SequenceKey, base_len: int, tokens: Sequence[int]) -> None: ...
    def limit(self, key: SequenceKey, limits: DraftLimits) -> None: ...

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._seen.pop(key, None)

    def poll(self) -> Iterable[tuple[SequenceKey, DraftTree | OutriderError]]:
        return ()

    @torch.inference_mode()
    def see(self, key: SequenceKey, start: int, states: Tensor) -> None:
        """states [positions, taps · width] of committed positions from `start` on."""
        self._seen.setdefault(key, []).extend(written(start, self._head.features(states[None])[0]))

    def take(self, key: SequenceKey) -> list[Features]:
        """Those of the positions that were seen since the last call."""
        return self._seen.pop(key, [])


def written(start: int, features: Tensor) -> Iterator[Features]:
    """features [positions, width], in parts that messages can hold."""
    most = max(1, _MAX_BYTES // (2 * features.shape[1]))
    for at in range(0, len(features), most):
        rows = features[at : at + most].to("cpu", torch.bfloat16).contiguous()
        yield Features(start + at, rows.view(torch.uint8).numpy().tobytes())


def read(features: Features, width: int) -> Tensor:
    """[positions, width]. Raises ValueError for bytes that are no whole vectors."""
    if not features.rows or len(features.rows) % (2 * width):
        raise ValueError(f"{len(features.rows)} bytes are no vectors of {width} numbers of 2 bytes")
    return torch.frombuffer(bytearray(features.rows), dtype=torch.bfloat16).view(-1, width)
