"""The reference: torch's scaled_dot_product_attention, on any device.

Rows of few queries (decoding, verification) go through one padded call per layer; a prefill chunk through one of
its own. Query heads that share a key head are folded into the query axis, so keys are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.attention.interface import KVCache, RowSpan

# Rows with at most this many queries share a padded call; padding a prefill to its neighbours would waste it.
_FEW = 16


@dataclass(slots=True)
class _Group:
    """Rows that run through one call."""

    rows: Tensor | slice
    """Flat rows, [sequences * queries]; padding rows repeat the last real one."""
    sequences: int
    queries: int
    slots: Tensor | slice
    """[sequences * kv_len] or a slice of consecutive slots (one sequence, no gather)."""
    kv_len: int
    mask: Tensor | None
    """[sequences, 1, queries, kv_len], True where a query may look; None when all may see all."""
    keep: Tensor | None
    """Indices of the real rows among the padded ones; None when all are real."""


def _group(spans: list[RowSpan], device: torch.device) -> _Group:
    queries = max(span.num_tokens for span in spans)
    kv_len = max(span.kv_len for span in spans)
    if len(spans) == 1:
        span = spans[0]
        rows: Tensor | slice = slice(span.start, span.start + span.num_tokens)
        slots: Tensor | slice
        if span.contiguous:
            slots = slice(span.slots[0], span.slots[0] + span.kv_len)
        else:
            slots = torch.tensor(span.slots, device=device)
        keep = None
    else:
        row_ids: list[int] = []
        kept: list[int] = []
        slot_ids: list[int] = []
        for number, span in enumerate(spans):
            last = span.start + span.num_tokens - 1
            row_ids.extend(min(span.start + i, last) for i in range(queries))
            kept.extend(range(number * queries, number * queries + span.num_tokens))
            slot_ids.extend(span.slots)
            slot_ids.extend([span.slots[0]] * (kv_len - span.kv_len))
        rows = torch.tensor(row_ids, device=device)
        slots = torch.tensor(slot_ids, device=device)
        keep = torch.tensor(kept, device=device) if len(kept) < len(row_ids) else None
    return _Group(rows, len(spans), queries, slots, kv_len, _mask(spans, queries, kv_len, device), keep)


def _mask(spans: list[RowSpan], queries: int, kv_len: int, device: torch.device) -> Tensor | None:
    if queries == 1 and all(span.kv_len == kv_len for span in spans):
        return None
    first = torch.tensor([span.kv_len - span.num_tokens for span in spans], device=device)
    last = torch.tensor([span.kv_len - 1 for span in spans], device=device)
    # A padding query looks where the last real one does.
    position = torch.minimum(first[:, None] + torch.arange(queries, device=device), last[:, None])
    return (torch.arange(kv_len, device=device) <= position[..., None])[:, None]


class SdpaAttention:
    """Attention by torch; see the module."""

    def prepare(self, spans: list[RowSpan], cache: KVCache) -> SdpaBatch:
        """Lays out a step. Spans are in the order of the flat batch."""
        device = cache.keys[0].device
        write = [slot for span in spans for slot in span.slots[span.kv_len - span.num_tokens :]]
        few = [span for span in spans if span.num_tokens <= _FEW]
        many = [span for span in spans if span.num_tokens > _FEW]
        groups = [_group(few, device)] if few else []
        groups.extend(_group([span], device) for span in many)
        return SdpaBatch(cache, torch.tensor(write, device=device), groups)


class SdpaBatch:
    """One step's groups over the cache."""

    def __init__(self, cache: KVCache, write_slots: Tensor, groups: list[_Group]) -> None:
        self._cache = cache
        self._write_slots = write_slots
        self._groups = groups
        # Masks folded for the model's head sharing, made by the first layer and used by all.
        self._masks: dict[int, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """See the interface."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(1, self._write_slots, key.transpose(0, 1))
        values.index_copy_(1, self._write_slots, value.transpose(0, 1))
        if len(self._groups) == 1 and self._groups[0].sequences == 1:
            return self._attend_group(0, query, keys, values, scale)
        output = query.new_empty(query.shape[0], query.shape[1] * values.shape[2])
        for number, group in enumerate(self._groups):
            result = self._attend_group(number, query[group.rows], keys, values, scale)
            if isinstance(group.rows, slice) or group.keep is None:
                output[group.rows] = result
            else:
                output[group.rows[group.keep]] = result[group.keep]
        return output

    def _attend_group(self, number: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        group = self._groups[number]
        kv_heads, head_dim = keys.shape[0], keys.shape[2]
        share = query.shape[1] // kv_heads
        n, t = group.sequences, group.queries
        # [n, kv_heads, share * t, head_dim]: the heads of one key head become more queries.
        q = query.view(n, t, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, share * t, head_dim)
        mask = self._mask(number, share, q.dtype)
        out = F.scaled_dot_product_attention(q, _read(keys, group), _read(values, group), attn_mask=mask, scale=scale)
        return out.view(n, kv_heads, share, t, -1).permute(0, 3, 1, 2, 4).reshape(n * t, -1)

    def _mask(self, number: int, share: int, dtype: torch.dtype) -> Tensor | None:
        mask = self._groups[number].mask
        if mask is None:
            return None
        if number not in self._masks:
            n, _, t, kv_len = mask.shape
            seen = mask[:, :, None].expand(n, 1, share, t, kv_len).reshape(n, 1, share * t, kv_len)
            self._masks[number] = torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill_(
                ~seen, -torch.inf
            )
        return self._masks[number]


def _read(cache: Tensor, group: _Group) -> Tensor:
    """[sequences, kv_heads, kv_len, head_dim] of one layer's keys or values."""
    if isinstance(group.slots, slice):
        return cache[None, :, group.slots]
    picked = cache.index_select(1, group.slots)
    return picked.view(cache.shape[0], group.sequences, group.kv_len, -1).transpose(0, 1)
