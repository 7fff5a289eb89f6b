"""What a target does for a head that draft workers hold: it computes the features that the head reads, and sends them
in commits instead of drafting itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafting.source import CloseReason, DraftSource, Features, Seen
from outrider.heads.features import FeatureCache, FeatureWriter
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation

_MAX_BYTES = 256 << 10
"""Of one message: the features of a long prompt come in several."""
_MOST = 1e12
"""Above all that a model computes, and its square below all that a head cannot."""
_KNOWN = 512
"""Positions of a cached prefix whose features are sent: the last ones, which tell a head nearly all."""
_MAX_HELD = 128
"""Steps whose states a sequence keeps while no draft is wanted: a GPU has no room for those of long texts."""

_EIGHT = torch.float8_e4m3fn
_Rows = NDArray[np.uint8]
"""Of each position the bytes."""


@dataclass(slots=True)
class _Shown:
    """What a sequence's draft is still to be sent."""

    wanted: bool
    """Whether draft workers may draft for it now."""
    tokens: Sequence[int]
    """Prompt and committed output."""
    writer: FeatureWriter
    bits: int
    """Of a number: what the target is to send, or what the draft worker reads if that is more."""
    begun: bool = False
    """Whether a draft has features of it: those that follow must leave no gap."""
    end: int = 0
    """Of the positions that were sent. An engine that made room runs earlier ones again."""
    held: list[Seen] = field(default_factory=list)
    """What was committed while no draft was wanted; too much of it is forgotten, and the head begins there anew."""


class HeadFeatures(DraftSource):
    """Is shown the target's states, and proposes nothing."""

    for_workers = True

    def __init__(
        self, name: str, taps: tuple[int, ...], read: Callable[[Tensor], Tensor] = lambda states: states, bits: int = 16
    ) -> None:
        """`read`: a head's features of the target's states, [batch, positions, …]; as they are from a target that has
        computed them. `bits`: of a number that is sent."""
        self.name = name
        self.taps = taps
        self._read = read
        self._bits = bits
        self._cache = FeatureCache()
        self._shown: dict[SequenceKey, _Shown] = {}

    def open(self, key: SequenceKey, spec: SequenceSpec, tokens: Sequence[int]) -> None:
        writer = FeatureWriter(self._cache, spec.salt)
        self._shown[key] = _Shown(spec.speculation.max_draft_tokens > 0, tokens, writer, self._bits)

    def limit(self, key: SequenceKey, limits: Speculation) -> None:
        if (shown := self._shown.get(key)) is not None:
            shown.wanted = limits.max_draft_tokens > 0

    def paired(self, key: SequenceKey, bits: int) -> None:
        """What is known comes again, with the next step's."""
        if (shown := self._shown.get(key)) is not None:
            shown.begun, shown.end, shown.bits = False, 0, max(bits, self._bits)

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        self._shown.pop(key, None)

    @torch.inference_mode()
    def see(self, step: Sequence[Seen]) -> Sequence[tuple[SequenceKey, Features]]:
        due: list[Seen] = []
        for one in step:
            if (shown := self._shown.get(one.key)) is None:
                continue
            if shown.wanted:
                due += [*shown.held, one]
                shown.held.clear()
            elif len(shown.held) == _MAX_HELD:
                shown.held.clear()
                shown.begun = False
            elif shown.begun:
                # A view would keep the whole step's states.
                shown.held.append(one._replace(states=one.states.clone()))
        if not due:
            return ()
        features = features_of(self._read, due).to("cpu", torch.bfloat16)
        rows = {bits: _bytes_of(features, bits) for bits in {self._shown[one.key].bits for one in due}}
        found, end = list[tuple[SequenceKey, Features]](), 0
        for one, its in zip(due, torch.split(features, [len(one.states) for one in due]), strict=True):
            shown, begin, end = self._shown[one.key], end, end + len(its)
            parts = self._show(shown, one.start, its, rows[shown.bits][begin:end])
            found += [(one.key, part) for part in parts]
        return found

    def erase(self, tenant: str) -> int:
        """As of a head that is here."""
        self._cache.clear()
        return 0

    def _show(self, shown: _Shown, start: int, features: Tensor, rows: _Rows) -> list[Features]:
        """The first ones come after those that are known: of a prefix that the target had cached, or that another draft
        was sent."""
        known = None if shown.begun else shown.writer.before(shown.tokens, start)
        parts = [] if known is None else [*written(max(0, start - _KNOWN), known[-_KNOWN:], shown.bits)]
        shown.writer.add(shown.tokens, start, features)
        known_len = max(0, shown.end - start)
        parts += _parts(start + known_len, rows[known_len:], shown.bits)
        if parts and not shown.begun:
            parts[0], shown.begun = replace(parts[0], first=True), True
        shown.end = max(shown.end, start + len(features))
        return parts


def features_of(read: Callable[[Tensor], Tensor], step: Sequence[Seen]) -> Tensor:
    """Of all its rows together: [positions, width]. Never a view: the next recorded step has the same memory."""
    return read(torch.cat([one.states for one in step])[None])[0]


def written(start: int, features: Tensor, bits: int = 16) -> Iterator[Features]:
    """features [positions, width], in parts that messages can hold."""
    return _parts(start, _bytes_of(features.to("cpu", torch.bfloat16), bits), bits)


def _bytes_of(features: Tensor, bits: int) -> _Rows:
    """features: bfloat16, on the host."""
    if bits == 16:
        return features.contiguous().view(torch.uint8).numpy()
    scales = features.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(_EIGHT).max
    return torch.cat([scales.view(torch.uint8), (features / scales).to(_EIGHT).view(torch.uint8)], -1).numpy()


def _parts(start: int, rows: _Rows, bits: int) -> Iterator[Features]:
    most = max(1, _MAX_BYTES // rows.shape[1])
    for at in range(0, len(rows), most):
        yield Features(start + at, rows[at : at + most].tobytes(), bits)


def read(features: Features, width: int) -> Tensor:
    """[positions, width]. Raises ValueError for bytes that are no whole vectors, and for numbers that no model has."""
    size = {8: 4 + width, 16: 2 * width}.get(features.bits)
    if size is None or not features.rows or len(features.rows) % size:
        raise ValueError(f"{len(features.rows)} bytes are no vectors of {width} numbers of {features.bits} bits")
    rows = torch.frombuffer(bytearray(features.rows), dtype=torch.uint8).view(-1, size)
    if features.bits == 8:
        rows = rows[:, :4].contiguous().view(torch.float32) * rows[:, 4:].contiguous().view(_EIGHT).float()
    else:
        rows = rows.view(torch.bfloat16)
    # Not a number fails too.
    if not bool((rows.abs() < _MOST).all()):
        raise ValueError(f"a number is none, or not below {_MOST:g}")
    return rows
