"""Triton kernels between the matrix products of a layer of Llama or a relative. Imported only where Triton is; see
`fused_gpu.py`.

Values are rounded to the model's dtype at the same places as in transformers, except that the rotation is rounded only
once. Activations are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(residual, delta, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """out = RMS norm of one token's residual, to which `delta` is added first if ADD. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    at = token * WIDTH + column
    x = tl.load(residual + at, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    w = tl.load(weight + column, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + at, normed.to(x.dtype), mask=inside)


# The step's layout starts anywhere in one buffer. Without this, kernels for further alignments would be compiled while
# serving.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_store_kernel(
    qkv,
    cos,
    sin,
    positions,
    slots,
    query_norm,
    key_norm,
    eps,
    query,
    key_cache,
    value_cache,
    cache_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotates one token's head, after its norm if NORM; queries go to `query`, keys and values to the token's slot of
    the cache.

    qkv [tokens, (HEADS + 2 * KV_HEADS) * 2 * HALF]; cos, sin [context, HALF]; query_norm, key_norm [2 * HALF]. Grid:
    [tokens, HEADS + 2 * KV_HEADS].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + d
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    if NORM:  # noqa: SIM102 - a constant, not joined with a value
        if head < HEADS + KV_HEADS:
            weight = (query_norm if head < HEADS else key_norm) + d
            a, b = first.to(tl.float32), second.to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
            left = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            right = tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
            first = ((a * scale).to(first.dtype).to(tl.float32) * left).to(first.dtype)
            second = ((b * scale).to(second.dtype).to(tl.float32) * right).to(second.dtype)
    if head < HEADS + KV_HEADS:
        angle = tl.load(positions + token) * HALF + d
        c = tl.load(cos + angle, mask=inside).to(tl.float32)
        s = tl.load(sin + angle, mask=inside).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(first.dtype)
    if head < HEADS:
        to = query + (token * HEADS + head) * (2 * HALF) + d
        tl.store(to, first, mask=inside)
        tl.store(to + HALF, second, mask=inside)
    else:
        of_key = head < HEADS + KV_HEADS
        at = tl.load(slots + token) * (2 * HALF) + d
        if of_key:
            to_key = key_cache + (head - HEADS).to(tl.int64) * cache_head_stride + at
            tl.store(to_key, first, mask=inside)
            tl.store(to_key + HALF, second, mask=inside)
        else:
            to_value = value_cache + (head - HEADS - KV_HEADS).to(tl.int64) * cache_head_stride + at
            tl.store(to_value, first, mask=inside)
            tl.store(to_value + HALF, second, mask=inside)


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, WIDTH] = silu(gate) * up, of gate_up [tokens, 2 * WIDTH]. Grid: [tokens, blocks of a row]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * (2 * WIDTH) + column, mask=inside, other=0.0)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * WIDTH + column, (opened * up.to(tl.float32)).to(gate.dtype), mask=inside)
