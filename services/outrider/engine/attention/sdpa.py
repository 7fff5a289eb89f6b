"""The reference: torch's scaled_dot_product_attention, on any device.

Rows of few queries (decoding, verification) share one padded call per layer; a prefill chunk has one of its own. Query
heads that share a key head are folded into the query axis, so keys are never repeated. A branch of a tree is a sequence
of its own in that call, which reads the keys along its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.interface import KVCache, Windows
from outrider.engine.kv.step import Chain, Row

# Rows with at most this many queries share a padded call. Padding others to the length of a prefill would be a waste.
_MAX_SMALL_TOKENS = 16
# The CPU kernel processes keys in parts of this many.
_PART = 512
# Key lengths are rounded up to this: the vector loop's remainder is rounded differently.
_ALIGN = 16
# Up to this many keys are summed in one pass. More are split at places that depend on their number and on the CPU.
_AT_ONCE = 192
# Queries are processed in parts of a multiple of this many. A part of few is summed in another order: of fewer than
# four, and of at most a 24th of a head's width.
_QUERY_PART, _MIN_PART, _WIDTH_OF_MIN_PART = 32, 4, 16


@dataclass(slots=True)
class _Group:
    """Chains that run through one call."""

    rows: Tensor | slice
    """Flat rows, [sequences * queries]; padding rows repeat the last real one."""
    sequences: int
    queries: int
    slots: Tensor | slice
    """[sequences * kv_len] or a slice of consecutive slots (one sequence, no gather). Only slots that the sequence
    itself has written: a masked key still enters the sum, times 0, and other slots may hold NaN."""
    kv_len: int
    positions: Tensor
    """[sequences, queries] up to which queries see; padding ones attend where the last real one does."""
    keep: Tensor | None
    """Indices of the real rows among the padded ones; None when all are real."""


def _group(chains: list[Chain], device: torch.device) -> _Group:
    queries = max(chain.num_tokens for chain in chains)
    kv_len = _padded(max(chain.kv_len for chain in chains))
    rows, keep = _rows(chains, queries, device)
    positions = _positions(chains, queries, device)
    return _Group(rows, len(chains), queries, _slots(chains, kv_len, device), kv_len, positions, keep)


def _padded(kv_len: int) -> int:
    """`kv_len` rounded up to a length at which sums are always split in the same way. Masked keys add exact zeros."""
    whole, rest = divmod(kv_len, _PART)
    rest = -(-rest // _ALIGN) * _ALIGN
    return whole * _PART + (rest if rest <= _AT_ONCE else _PART)


def _missing(queries: int, head_dim: int) -> int:
    """How many more queries make the last part long enough."""
    rest, least = queries % _QUERY_PART, max(_MIN_PART, head_dim // _WIDTH_OF_MIN_PART)
    return least - rest if 0 < rest < least else 0


def _rows(chains: list[Chain], queries: int, device: torch.device) -> tuple[Tensor | slice, Tensor | None]:
    """_Group.rows and _Group.keep."""
    if len(chains) == 1 and chains[0].num_tokens == queries:
        return slice(chains[0].start, chains[0].start + queries), None
    rows: list[int] = []
    keep: list[int] = []
    for number, chain in enumerate(chains):
        last = chain.start + chain.num_tokens - 1
        rows.extend(min(chain.start + i, last) for i in range(queries))
        keep.extend(range(number * queries, number * queries + chain.num_tokens))
    return torch.tensor(rows, device=device), torch.tensor(keep, device=device) if len(keep) < len(rows) else None


def _slots(chains: list[Chain], kv_len: int, device: torch.device) -> Tensor | slice:
    """_Group.slots."""
    if len(chains) == 1 and chains[0].kv_len == kv_len and chains[0].contiguous:
        first = chains[0].row.slots[0]
        return slice(first, first + kv_len)
    slots: list[int] = []
    for chain in chains:
        slots.extend(chain.slots)
        slots.extend([slots[-chain.kv_len]] * (kv_len - chain.kv_len))
    return torch.tensor(slots, device=device)


def _positions(chains: list[Chain], queries: int, device: torch.device) -> Tensor:
    firsts = [chain.kv_len - 1 if chain.row.both_ways else chain.cached_len for chain in chains]
    first = torch.tensor(firsts, device=device)
    last = torch.tensor([chain.kv_len - 1 for chain in chains], device=device)
    return torch.minimum(first[:, None] + torch.arange(queries, device=device), last[:, None])


class SdpaAttention:
    def __init__(self, windows: Windows = ()) -> None:
        self._windows = windows

    def prepare(self, rows: list[Row], cache: KVCache) -> SdpaBatch:
        """Lays out a step. Rows are in the order of the flat batch."""
        device = cache.keys[0].device
        write = [slot for row in rows for slot in row.written_slots()]
        chains = [chain for row in rows for chain in row.chains()]
        few = [chain for chain in chains if chain.num_tokens <= _MAX_SMALL_TOKENS]
        many = [chain for chain in chains if chain.num_tokens > _MAX_SMALL_TOKENS]
        groups = [_group(few, device)] if few else []
        groups.extend(_group([chain], device) for chain in many)
        return SdpaBatch(cache, torch.tensor(write, device=device), groups, self._windows)

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None:
        cache.move(moves)


class SdpaBatch:
    """One step's groups over the cache."""

    def __init__(self, cache: KVCache, write_slots: Tensor, groups: list[_Group], windows: Windows) -> None:
        self._cache = cache
        self._write_slots = write_slots
        self._groups = groups
        self._windows = windows
        # Masks folded for the model's head sharing, made by the first layer with a window and used by all with it.
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        self.store(key, value, layer)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        window = self._windows[layer] if self._windows else None
        if len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._attend_group(0, query, keys, values, scale, window)
        output = query.new_empty(query.shape[0], query.shape[1] * values.shape[2])
        for number, group in enumerate(self._groups):
            result = self._attend_group(number, query[group.rows], keys, values, scale, window)
            if isinstance(group.rows, slice) or group.keep is None:
                output[group.rows] = result
            else:
                output[group.rows[group.keep]] = result[group.keep]
        return output

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        for cached, new in ((self._cache.keys[layer], key), (self._cache.values[layer], value)):
            cached.index_copy_(1, self._write_slots, new.transpose(0, 1))

    def _attend_group(
        self, number: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        group = self._groups[number]
        kv_heads, head_dim = keys.shape[0], keys.shape[2]
        share = query.shape[1] // kv_heads
        n, t = group.sequences, group.queries
        # [n, kv_heads, share * t, head_dim]: the query heads of one key head become further queries.
        q = query.view(n, t, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, share * t, head_dim)
        if missing := _missing(share * t, head_dim):
            q = F.pad(q, (0, 0, 0, missing))
        mask = self._mask(number, window, share, missing, q.dtype)
        out = F.scaled_dot_product_attention(q, _read(keys, group), _read(values, group), attn_mask=mask, scale=scale)
        if missing:
            out = out[:, :, : share * t]
        return out.reshape(n, kv_heads, share, t, -1).permute(0, 3, 1, 2, 4).reshape(n * t, -1)

    def _mask(self, number: int, window: int | None, share: int, missing: int, dtype: torch.dtype) -> Tensor:
        group = self._groups[number]
        if (number, window) not in self._masks:
            n, t, kv_len = group.sequences, group.queries, group.kv_len
            at, keys = group.positions[..., None], torch.arange(kv_len, device=group.positions.device)
            seen = keys <= at if window is None else (keys <= at) & (keys > at - window)
            seen = seen[:, None, None].expand(n, 1, share, t, kv_len).reshape(n, 1, share * t, kv_len)
            hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._masks[number, window] = F.pad(hidden, (0, 0, 0, missing))
        return self._masks[number, window]


def _read(cache: Tensor, group: _Group) -> Tensor:
    """[sequences, kv_heads, kv_len, head_dim] of one layer's keys or values."""
    if isinstance(group.slots, slice):
        return cache[None, :, group.slots]
    picked = cache.index_select(1, group.slots)
    return picked.view(cache.shape[0], group.sequences, group.kv_len, -1).transpose(0, 1)
