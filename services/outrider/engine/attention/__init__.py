"""Attention over a paged KV cache, behind one interface; an implementation is chosen at start.

Not here: which blocks a sequence has (`kv/`). Begin with `interface`.
"""

from outrider.engine.attention.choice import make_attention
from outrider.engine.attention.interface import Attention, Batch, KVCache
from outrider.engine.attention.paged import Shape, TritonMissing
from outrider.engine.attention.sdpa import SdpaAttention

__all__ = [
    "Attention",
    "Batch",
    "KVCache",
    "SdpaAttention",
    "Shape",
    "TritonMissing",
    "make_attention",
]
