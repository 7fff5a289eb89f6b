"""Attention over a paged KV cache, behind one interface; an implementation is chosen at start."""

from outrider.engine.attention.interface import Attention, Batch, KVCache, RowSpan
from outrider.engine.attention.sdpa import SdpaAttention

__all__ = ["Attention", "Batch", "KVCache", "RowSpan", "SdpaAttention"]
