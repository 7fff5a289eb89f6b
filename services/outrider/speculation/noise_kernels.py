"""The Triton kernel of coupled sampling. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["stride", "width"],
    do_not_specialize_on_alignment=["rows", "tops", "inverse", "floors", "keys", "token_map"],
)
def noisy_scores_kernel(
    logits,
    rows,
    tops,
    inverse,
    floors,
    keys,
    token_map,
    scores,
    stride,
    width,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scores [grid's rows, width] = scaled logit + Gumbel noise, in float32; -inf below the row's floor.

    rows, tops, inverse, floors, keys: of each row its row of logits, their maximum, the inverse of its temperature, its
    least scaled logit, and the key of its noise. The noise is that of `noise.py`. MAPPED: token_map has the token id of
    each logit. `stride`: from one row of logits to the next. Grid: [rows, blocks of the width].
    """
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(logits + tl.load(rows + number) * stride + at, mask=inside, other=float("-inf"))
    token = tl.load(token_map + at, mask=inside, other=0) if MAPPED else at
    scaled = (x - tl.load(tops + number)) * tl.load(inverse + number)
    value = token.to(tl.uint64) * 0x9E3779B97F4A7C15 + tl.load(keys + number).to(tl.uint64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    drawn = (value >> 11).to(tl.int64)
    u = (drawn.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    # Near 1 float32 has too few digits for u, but enough for what is left to 1.
    rest = ((9007199254740991 - drawn).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    noise = -tl.log(tl.where(rest < 0.015625, series, -tl.log(u)))
    score = tl.where(scaled >= tl.load(floors + number), scaled + noise, float("-inf"))
    tl.store(scores + number * width + at, score, mask=inside)
