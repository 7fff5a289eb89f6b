"""Triton kernels of a layer of Llama or a relative, its matrix products among them. Imported only where Triton is; see
`fused_gpu.py`.

Values are rounded to the model's dtype at the same places as in transformers, except that the rotation is rounded only
once, and a norm that is joined to a product where its weight is applied. Activations are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(residual, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """out = RMS norm of one token's residual. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    at = token * WIDTH + column
    x = tl.load(residual + at, mask=inside, other=0.0)
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


BLOCK_K, HALVINGS = tl.constexpr(64), tl.constexpr(6)
"""Columns that a product takes at a time, the same for all tiles, and how often they are halved."""


@triton.jit
def _rows_of(x, norm, squares, row, rows, k, K, NORM: tl.constexpr):
    """Columns k of the rows of x, [columns, rows], times the norm's weight if NORM; and squares with theirs added."""
    tile = tl.load(x + row[None, :] * K + k[:, None], mask=(row < rows)[None, :] & (k < K)[:, None], other=0.0)
    if NORM:
        wide = tile.to(tl.float32)
        # Not "+": then the compiler would choose, tile by tile, whether to round between.
        squares = tl.fma(wide, wide, squares)
        tile = (wide * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)[:, None]).to(tile.dtype)
    return tile, squares


@triton.jit
def _multiplied(weight, tile, sums, n, k, K, N, WIDEN: tl.constexpr):
    """sums [1, n, rows], with the products of these columns added."""
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    of = tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    if WIDEN:
        return sums + tl.dot(of.to(tl.float32), tile.to(tl.float32), input_precision="ieee")[None]
    # Numbers of 8 bits are widened, exactly, in registers: what comes from memory are bytes.
    return tl.dot(of.to(tile.dtype)[None], tile[None], sums)


@triton.jit
def _finished(
    sums, scale, scales, bias, n, N, SCALED: tl.constexpr, BIAS: tl.constexpr, SHAPE: tl.constexpr, dtype: tl.constexpr
):
    """[n, rows], rounded. scale: of each row of x; scales: of each of the weight."""
    found = tl.reshape(sums, SHAPE) * scale[None, :]
    if SCALED:
        found *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        found += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    return found.to(dtype).to(tl.float32)


# "rows" may be 1: without this, that would be a kernel of its own.
@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    norm,
    weight,
    scales,
    bias,
    out,
    rows,
    eps,
    K,
    N,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [rows, N] = x [rows, K] times the transposed weight [N, K]. Grid: [tiles of ROWS, blocks of N].

    NORM: of the RMS norm of x, which is scaled after the product. SCALED: each row of the weight, in 8 bits, has its
    scale, in float32. BIAS is added. GATE: weight [2 * N, K] has gate and
    up, and out = silu(gate) * up. ADD: to out.

    A row has the same bits in any number of rows and at any size of a tile: its sums are over K in order, by one
    instruction (a product of three dimensions is never one of Hopper's or Blackwell's own, whose width would follow
    the tile), and its squares are added in pairs that are the same in every layout. WIDEN is for the interpreter.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([1, BLOCK_N, ROWS], tl.float32)
    above = sums
    squares = tl.zeros([BLOCK_K, ROWS], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile, squares = _rows_of(x, norm, squares, row, rows, k, K, NORM)
        sums = _multiplied(weight, tile, sums, n, k, K, N, WIDEN)
        if GATE:
            above = _multiplied(weight + N * K, tile, above, n, k, K, N, WIDEN)
    scale = tl.full([ROWS], 1.0, tl.float32)
    if NORM:
        total = squares
        for _ in tl.static_range(HALVINGS):
            total = tl.sum(tl.reshape(total, [2, total.shape[0] // 2, ROWS]), axis=0)
        scale = tl.rsqrt(tl.reshape(total, [ROWS]) / K + eps)
    dtype: tl.constexpr = x.dtype.element_ty
    found = _finished(sums, scale, scales, bias, n, N, SCALED, BIAS, [BLOCK_N, ROWS], dtype)
    if GATE:
        up = _finished(above, scale, scales + N, bias + N, n, N, SCALED, BIAS, [BLOCK_N, ROWS], dtype)
        found = (found / (1.0 + tl.exp(-found))).to(dtype).to(tl.float32) * up
    to = out + row[None, :] * N + n[:, None]
    inside = (row < rows)[None, :] & (n < N)[:, None]
    if ADD:
        found += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    # float32 where that is what out has: rounded all the same.
    tl.store(to, found.to(dtype).to(out.dtype.element_ty), mask=inside)
