"""Triton kernels of paged attention, imported only if Triton is installed. `paged.py` explains them.

Notation: a tile is a few consecutive queries of one row, times the query heads that share one key head. All integers
of a step's layout are int64. head_dim is contiguous everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


# The layout's arrays start anywhere in one buffer. Without this, kernels for further alignments would be compiled while
# serving.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    cache_head_stride,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """Writes one token's keys and values to its slot. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, KV_HEADS_PADDED)[:, None]
    d = tl.arange(0, HEAD_PADDED)[None, :]
    inside = (head < KV_HEADS) & (d < HEAD_DIM)
    to = head.to(tl.int64) * cache_head_stride + tl.load(slots + token) * HEAD_DIM + d
    k = tl.load(key + token * key_stride + head * key_head_stride + d, mask=inside)
    tl.store(key_cache + to, k, mask=inside)
    v = tl.load(value + token * value_stride + head * value_head_stride + d, mask=inside)
    tl.store(value_cache + to, v, mask=inside)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """Float32 products as three of tf32, which are as exact and run on tensor cores; other dtypes directly."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _look(best, total, acc, q, keys, values, place, there, seen, scale, table, HEAD_DIM: tl.constexpr,
          BLOCK_SIZE: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """The running softmax with a tile of keys more: greatest scores, sums of weights, and sums of values. `place`: of
    each key, in its row's blocks; `seen` [rows, keys]. Rows that see none of them stay as they are, to the bit."""
    d = tl.arange(0, q.shape[1])
    block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0)
    # Slots beyond the limit may hold NaN. They are not read, so that their zero weight stays zero.
    cells = (block * BLOCK_SIZE + place % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
    readable = there[:, None] & (d < HEAD_DIM)[None, :]
    k = tl.load(keys + cells, mask=readable, other=0.0)
    score = tl.where(seen, _dot(q, tl.trans(k), WIDEN) * scale, float("-inf"))
    v = tl.load(values + cells, mask=readable, other=0.0)
    new_best = tl.maximum(best, tl.max(score, axis=1))
    # No key so far: any finite maximum makes all weights zero instead of NaN.
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(score - shift[:, None])
    decay = tl.exp2(best - shift)
    acc = acc * decay[:, None] + _dot(weight.to(v.dtype), v, WIDEN)
    # Not "+": then the compiler would choose, place by place, whether to round between.
    return new_best, tl.fma(total, decay, tl.sum(weight, axis=1)), acc


@triton.jit
def _seen(position, limits, WINDOW: tl.constexpr):
    """Which keys each query attends to: [rows, keys]. Its limit is behind its own position, which it sees."""
    seen = position[None, :] < limits[:, None]
    if WINDOW:
        seen = seen & (position[None, :] >= limits[:, None] - WINDOW)
    return seen


@triton.jit
def _on_path(position, own, path):
    """The places of a path's keys at these positions. Bit n of `path` says whether node n, at own + n, is on it."""
    place, node = position, own
    while path != 0:
        on_path = (path & 1).to(own.dtype)
        place = tl.where((position == own) & (on_path != 0), node, place)
        own, node, path = own + on_path, node + 1, path >> 1
    return place


@triton.jit
def _look_along_paths(best, total, acc, q, keys, values, position, limit, limits, own, masks, real, scale, table,
                      SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
                      WIDEN: tl.constexpr):  # fmt: skip
    """_look at the tile of keys that has a tree's nodes, once for each path that ends among the queries. `masks`: where
    each query's path is."""
    m = tl.arange(0, q.shape[0])
    paths = tl.load(masks, mask=real, other=0)
    before = tl.load(masks - 1, mask=real & (m >= SHARE), other=0)
    begins = ((paths & before) != before) & (m % SHARE == 0)
    number = tl.cumsum(begins.to(tl.int32), axis=0)
    for path in range(tl.max(number, axis=0) + 1):
        # The last token's has the bits of all before it.
        place = _on_path(position, own, tl.max(tl.where(number == path, paths, 0), axis=0))
        if q.dtype == tl.float32:
            # The same in fewer registers. The other dtypes have enough, and would spill some.
            limited = tl.where(number == path, limits, 0)
            seen, there = _seen(position, limited, WINDOW), position < tl.max(limited, axis=0)
        else:
            seen, there = _seen(position, limits, WINDOW) & (number == path)[:, None], position < limit
        best, total, acc = _look(
            best, total, acc, q, keys, values, place, there, seen, scale, table, HEAD_DIM, BLOCK_SIZE, WIDEN
        )
    return best, total, acc


@triton.jit(
    do_not_specialize_on_alignment=[
        "tile_start",
        "tile_count",
        "tile_blocks",
        "tile_own",
        "blocks",
        "visible",
        "own_mask",
    ]
)
def attend_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial,
    partial_max,
    partial_sum,
    tile_start,
    tile_count,
    tile_blocks,
    tile_own,
    blocks,
    visible,
    own_mask,
    scale,
    query_stride,
    query_head_stride,
    cache_head_stride,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile over the key tiles of one split: those whose number is `split` modulo NUM_SPLITS.

    Grid: [tiles, kv_heads, NUM_SPLITS], or fewer splits where the rest would find no keys. With one split the result
    goes to `out`; otherwise sums, maxima and weights go to `partial*` and `reduce_kernel` joins them, and each row may
    end in a tree. `scale` includes log2(e), because the hardware computes powers of two. WINDOW: how many positions a
    token looks back at most, its own included; 0: all. WIDEN multiplies in float32, with equal products: Triton's
    interpreter has no matrix product of bfloat16.

    A key is summed where its position says. So the tile of keys that has nodes of a tree is read once for each path
    that ends among the queries, in the order of a chain: a node has the bits of the same token in a chain.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(tile_count + tile)
    if count > 0:
        start = tl.load(tile_start + tile)
        m = tl.arange(0, TILE_ROWS)
        d = tl.arange(0, HEAD_PADDED)
        token = start + m // SHARE
        head = kv_head * SHARE + m % SHARE
        real = m < count * SHARE
        limits = tl.load(visible + token, mask=real, other=0)
        if HEAD_PADDED <= 64 or query.dtype.element_ty == tl.float32:
            # Many small tiles share a multiprocessor, and three products of tf32 need a tile of queries twice: there
            # are no registers to spare for positions in 64 bits.
            limits = limits.to(tl.int32)
        limit = tl.max(limits, axis=0)
        if split * TILE_KEYS < limit:
            inside = real[:, None] & (d < HEAD_DIM)[None, :]
            at = token[:, None] * query_stride + head[:, None] * query_head_stride + d[None, :]
            q = tl.load(query + at, mask=inside, other=0.0)
            table = blocks + tl.load(tile_blocks + tile)
            own = tl.load(tile_own + tile).to(limits.dtype)
            keys = key_cache + kv_head.to(tl.int64) * cache_head_stride
            values = value_cache + kv_head.to(tl.int64) * cache_head_stride
            best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            total = tl.zeros([TILE_ROWS], tl.float32)
            acc = tl.zeros([TILE_ROWS, HEAD_PADDED], tl.float32)
            begin, step = split * TILE_KEYS, NUM_SPLITS * TILE_KEYS
            if WINDOW:
                oldest = tl.min(tl.where(real, limits, limit), axis=0) - WINDOW
                begin += (tl.maximum(oldest, 0) // TILE_KEYS + NUM_SPLITS - 1 - split) // NUM_SPLITS * step
            # Of keys that are in the order of a chain for all queries. A chain has no others.
            end = tl.where(own < limit, own // TILE_KEYS * TILE_KEYS, limit) if NUM_SPLITS > 1 else limit
            for first in range(begin, end, step):
                position = first + tl.arange(0, TILE_KEYS)
                seen = _seen(position, limits, WINDOW)
                best, total, acc = _look(
                    best, total, acc, q, keys, values, position, position < limit, seen, scale, table,
                    HEAD_DIM, BLOCK_SIZE, WIDEN,
                )  # fmt: skip
            if NUM_SPLITS > 1:
                # A tree's nodes are in fewer tiles than there are splits.
                position = begin + tl.cdiv(tl.maximum(end - begin, 0), step) * step + tl.arange(0, TILE_KEYS)
                if tl.min(position, axis=0) < limit:
                    best, total, acc = _look_along_paths(
                        best, total, acc, q, keys, values, position, limit, limits, own, own_mask + token, real, scale,
                        table, SHARE, HEAD_DIM, BLOCK_SIZE, WINDOW, WIDEN,
                    )  # fmt: skip
            if NUM_SPLITS == 1:
                to = token[:, None] * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
                # Rows of the tile without a query have no keys.
                total = tl.where(real, total, 1.0)
                tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
            else:
                part = (token * HEADS + head) * NUM_SPLITS + split
                tl.store(partial + part[:, None] * HEAD_PADDED + d[None, :], acc, mask=real[:, None])
                tl.store(partial_max + part, best, mask=real)
                tl.store(partial_sum + part, total, mask=real)


@triton.jit(do_not_specialize_on_alignment=["visible"])
def reduce_kernel(
    partial,
    partial_max,
    partial_sum,
    visible,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Joins the splits of one token and head. Grid: [tokens, heads]. Tokens that see nothing are padding."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    limit = tl.load(visible + token)
    if limit > 0:
        split = tl.arange(0, NUM_SPLITS)
        d = tl.arange(0, HEAD_PADDED)
        # The other splits were not run in this step; their buffers hold values of an earlier one.
        live = split * TILE_KEYS < limit
        part = (token * HEADS + head) * NUM_SPLITS + split
        best = tl.load(partial_max + part, mask=live, other=float("-inf"))
        weight = tl.exp2(best - tl.max(best, axis=0))
        total = tl.sum(weight * tl.load(partial_sum + part, mask=live, other=0.0), axis=0)
        sums = tl.load(partial + part[:, None] * HEAD_PADDED + d[None, :], mask=live[:, None], other=0.0)
        result = tl.sum(weight[:, None] * sums, axis=0) / total
        to = token * (HEADS * HEAD_DIM) + head * HEAD_DIM + d
        tl.store(out + to, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
