"""Triton kernels that choose the token which follows each row of logits. Imported only where Triton is.

`survey_kernel` changes the logits as requests ask, and finds the greatest of each block of the vocabulary;
`choose_kernel` joins them and samples, one program a row. Top-k and top-p are floors of the logits, found by bisection:
nothing is sorted. Logits are compared as integers in the same order (`_ordered`), which are exact; masses are summed in
float32, and a choice that depends on more than that can tell is marked. Only tokens whose score in float32 may win are
scored in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.speculation.changes import COLUMNS

SURE, UNSURE, NOT_FINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# They start anywhere in one buffer. Without this, kernels for further alignments would be compiled while serving.
_COLUMNS = ["numbers", "reals", "integers", "quotas"]
_MASS_ERROR = tl.constexpr(4e-5)
"""Relative, of a quotient of two sums of so many exponentials in float32: the terms' own errors are below 1e-6."""
_SCORE_ERROR = tl.constexpr(1e-3)
"""Of a score in float32, for tokens that may win. Those are at most 41 below the likeliest, because noise is from -3.7
to 37.4; the rounding of such numbers is far less."""
_NO_MIN_P = tl.constexpr(-690.0)
"""The logarithm of a min-p that cuts nothing."""
TRIED = tl.constexpr(4)
"""Floors that are tried in one pass over the logits."""
_TIE = tl.constexpr(4e-12)
"""By so little of the temperature the reference takes two logits for equal: 1e-12 of a floor, and its own rounding."""


@triton.jit
def _ordered(x):
    """int32 in the order of float32."""
    # -0 becomes 0, to which it is equal.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(ordered):
    """The float32 of an int32 in its order."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["stride", "width", "mask_bytes"], do_not_specialize_on_alignment=list(COLUMNS))
def survey_kernel(
    logits,
    peaks,
    places,
    changes,
    penalties,
    biased,
    biases,
    seen,
    counts,
    prompted,
    drafted,
    banned,
    masks,
    stride,
    width,
    mask_bytes,
    BLOCK: tl.constexpr,
    CHANGED: tl.constexpr,
):
    """Of each block of a row its greatest logit, NaN where one is no number or +inf, and the first token that has it.

    Grid: [rows, blocks of the width]. peaks, places: [rows, blocks].

    CHANGED: after the row's changes, which are made in place, in float32. changes [9, rows] says where a row's entries
    begin, and how many there are: in order biases, seen tokens (begins), biases, seen tokens (counts), drafted and
    banned ones (begins), drafted and banned ones (counts); and the number of its mask, or -1. penalties [3, rows]:
    repetition, frequency, presence. biased, seen and banned are tokens, drafted are places among those that are seen.
    masks [masks, mask_bytes] has a bit for each token. The rule is that of `changes.py`.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values, at = logits + row * stride, block * BLOCK + tl.arange(0, BLOCK)
    if CHANGED:
        of_row, rows = changes + row, tl.num_programs(0)
        first, count = tl.load(of_row), tl.load(of_row + 2 * rows)
        _add_biases(values, block, biased + first, biases + first, count, BLOCK)
        # Other threads wrote what is read from here on.
        tl.debug_barrier()
        first, count = tl.load(of_row + rows), tl.load(of_row + 3 * rows)
        own, num_own = drafted + tl.load(of_row + 4 * rows), tl.load(of_row + 6 * rows)
        _penalise(
            values, block, penalties + row, rows, seen + first, counts + first, prompted + first, count, own, num_own,
            BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        mask, own, num_own = tl.load(of_row + 8 * rows), banned + tl.load(of_row + 5 * rows), tl.load(of_row + 7 * rows)
        bits = masks + mask * mask_bytes
        closed = _closed(values, block, bits, tl.where(mask < 0, -1, mask_bytes), own, num_own, width, BLOCK)
        tl.store(values + at, float("-inf"), mask=closed & (at < width))
        tl.debug_barrier()
    x = tl.load(values + at, mask=at < width, other=float("-inf")).to(tl.float32)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
    peak = tl.max(x, axis=0)
    first_at = tl.min(tl.where(x == peak, at, width), axis=0)
    to = row * tl.num_programs(1) + block
    tl.store(peaks + to, tl.where(broken > 0, float("nan"), peak))
    tl.store(places + to, first_at)


@triton.jit
def _here(tokens, start, count, block, BLOCK: tl.constexpr):
    """From `start` on: the numbers of some entries, their tokens, and which of these are in the block."""
    entry = start + tl.arange(0, BLOCK)
    token = tl.load(tokens + entry, mask=entry < count, other=-1)
    return entry, token, (token >= block * BLOCK) & (token < (block + 1) * BLOCK)


@triton.jit
def _add_biases(values, block, tokens, biases, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        entry, token, here = _here(tokens, start, count, block, BLOCK)
        x = tl.load(values + token, mask=here, other=0.0).to(tl.float32) + tl.load(biases + entry, mask=here, other=0.0)
        tl.store(values + token, x.to(values.dtype.element_ty), mask=here)


@triton.jit
def _penalise(values, block, penalties, rows, tokens, counts, prompted, num_seen, drafted, num_drafted,
              BLOCK: tl.constexpr):  # fmt: skip
    """Products and quotients are of float64, rounded once: they are those of float32, and none is joined with a sum."""
    repetition, frequency = tl.load(penalties).to(tl.float64), tl.load(penalties + rows).to(tl.float64)
    presence = tl.load(penalties + 2 * rows)
    for start in range(0, num_seen, BLOCK):
        entry, token, here = _here(tokens, start, num_seen, block, BLOCK)
        count = tl.load(counts + entry, mask=here, other=0.0)
        for number in range(num_drafted):
            count += (entry == tl.load(drafted + number)).to(tl.float32)
        x = tl.load(values + token, mask=here, other=0.0).to(tl.float32)
        wide = x.to(tl.float64)
        repeated = tl.where(x > 0, wide / repetition, wide * repetition).to(tl.float32)
        x = tl.where((count > 0) | (tl.load(prompted + entry, mask=here, other=0) != 0), repeated, x)
        x -= (count.to(tl.float64) * frequency).to(tl.float32) + tl.where(count > 0, presence, 0.0)
        tl.store(values + token, x.to(values.dtype.element_ty), mask=here)


@triton.jit
def _closed(values, block, bits, num_bytes, banned, num_banned, width, BLOCK: tl.constexpr):
    """Which tokens of a block may not be chosen. What the mask allows takes precedence over bans: where they leave
    nothing of the whole row, they do not count. num_bytes: of the mask, -1 for none."""
    masked, hit, left = _forbidden(values, block, bits, num_bytes, banned, num_banned, width, BLOCK)
    if num_banned > 0:
        other = 0 * block
        while (left == 0) & (other * BLOCK < width):
            _masked, _hit, left = _forbidden(values, other, bits, num_bytes, banned, num_banned, width, BLOCK)
            other += 1
    return masked | (hit.to(tl.int32) * left > 0)


@triton.jit
def _forbidden(values, block, bits, num_bytes, banned, num_banned, width, BLOCK: tl.constexpr):
    """Which tokens of a block the mask forbids, which are banned, and whether any is left."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + at // 8, mask=at // 8 < num_bytes, other=0).to(tl.int32)
    masked = ((byte >> (at % 8)) & 1) < (num_bytes >= 0).to(tl.int32)
    hit = at < 0
    for number in range(num_banned):
        hit = hit | (at == tl.load(banned + number))
    x = tl.load(values + at, mask=(at < width) & (masked == 0) & (hit == 0), other=float("-inf")).to(tl.float32)
    return masked, hit, tl.max((x > float("-inf")).to(tl.int32), axis=0)


@triton.jit
def _from(values, peaks, width, top, inverse, least, BLOCK: tl.constexpr):
    """For each of `least` [n]: how many logits are so much or more, as integers, and what they weigh beside `top`."""
    count = tl.zeros([BLOCK, least.shape[0]], tl.int32)
    mass, lowest = count.to(tl.float32), tl.min(least, axis=0)
    for block in range(tl.cdiv(width, BLOCK)):
        if _ordered(tl.load(peaks + block)) >= lowest:
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < width, other=float("-inf")).to(tl.float32)
            found = (_ordered(x)[:, None] >= least[None, :]) & (at < width)[:, None]
            count += found.to(tl.int32)
            mass += tl.where(found, tl.exp((x - top) * inverse)[:, None], 0.0)
    return tl.sum(count, axis=0), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _from_one(values, peaks, width, top, inverse, least, BLOCK: tl.constexpr):
    """As _from, of one."""
    count, mass = _from(values, peaks, width, top, inverse, least + tl.zeros([1], tl.int32), BLOCK)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(values, peaks, width, top, inverse, low, kept, most, wanted, BLOCK: tl.constexpr, TRIED: tl.constexpr):
    """From `low` on there are `kept` logits. Where that is more than `most`: the greatest integer from which on there
    are `most` or more, and they weigh `wanted`, or one that keeps the same. And what they weigh that are more."""
    high, above, over = _ordered(top) + 1, 0 * kept, 0 * wanted
    while (high.to(tl.int64) - low.to(tl.int64) > 1) & (kept > most) & (kept - above > 1):
        gap = high.to(tl.int64) - low.to(tl.int64)
        tried = (low + gap * (1 + tl.arange(0, TRIED)) // (TRIED + 1)).to(tl.int32)
        count, mass = _from(values, peaks, width, top, inverse, tried, BLOCK)
        enough = (count >= most) & (mass >= wanted)
        low = tl.maximum(low, tl.max(tl.where(enough, tried, low), axis=0))
        kept = tl.minimum(kept, tl.min(tl.where(enough, count, kept), axis=0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, tried), axis=0))
        above = tl.maximum(above, tl.max(tl.where(enough, above, count), axis=0))
        over = tl.maximum(over, tl.max(tl.where(enough, over, mass), axis=0))
    return low, over


@triton.jit
def _mixed(token, key):
    """The 53 random bits of a token: those of `noise.py`."""
    value = token.to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return ((value ^ (value >> 31)) >> 11).to(tl.int64)


@triton.jit
def _noise(drawn):
    """Gumbel noise in float32."""
    u = (drawn.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    # Near 1 float32 has too few digits for u, but enough for what is left to 1.
    rest = ((9007199254740991 - drawn).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333333 + rest * 0.25)))
    return -tl.log(tl.where(rest < 0.015625, series, -tl.log(u)))


@triton.jit
def _exact_noise(drawn):
    """As _noise, in float64."""
    u = (drawn.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(u))


@triton.jit
def _winner(score, token):
    """The greatest of the scores, and the first token that has it."""
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, 2147483647), axis=0)


@triton.jit
def _likeliest(peaks, places, row, blocks, BLOCKS: tl.constexpr):
    """The greatest logit of a row, the first token that has it, and whether the row is SURE or NOT_FINITE."""
    block = tl.arange(0, BLOCKS)
    peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=float("-inf"))
    place = tl.load(places + row * blocks + block, mask=block < blocks, other=2147483647)
    broken = tl.max((peak != peak).to(tl.int32), axis=0)
    top, token = _winner(tl.where(peak != peak, float("-inf"), peak), place)
    return top, token, tl.where((broken > 0) | (top == float("-inf")), NOT_FINITE, SURE)


@triton.jit(do_not_specialize=["stride", "width", "count"], do_not_specialize_on_alignment=_COLUMNS)
def choose_kernel(
    logits,
    peaks,
    places,
    numbers,
    reals,
    integers,
    quotas,
    out,
    count,
    stride,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    RATIO: tl.constexpr,
    QUOTAS: tl.constexpr,
):
    """out [rows, 2]: the token of each row, and SURE, UNSURE or NOT_FINITE. Grid: [rows].

    numbers [rows]: the row's place among those that are sampled, or -1: then it is its likeliest token. Of those that
    are sampled, reals [4, count], float64, has temperature, top-p, the logarithm of min-p and the bound of acceptance,
    and integers [3, count] top-k (the width: all), the key of the noise and the drafted token. RATIO: quotas [count, 2,
    QUOTAS] has the tokens that q names, -1 for none, and its shares of 2 ** 16. The rule is that of `choosing.py`.
    BLOCKS: at least as many as the width has.
    """
    row, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, BLOCK)
    top, token, state = _likeliest(peaks, places, row, blocks, BLOCKS)
    if SAMPLED:
        number = tl.load(numbers + row)
        if (number >= 0) & (state == SURE):
            token, state = _sample(
                logits + row * stride,
                peaks + row * blocks,
                top,
                reals + number,
                integers + number,
                quotas + number * 2 * QUOTAS,
                count,
                width,
                BLOCK,
                RATIO,
                QUOTAS,
            )
    tl.store(out + 2 * row, token.to(tl.int64))
    tl.store(out + 2 * row + 1, state.to(tl.int64))


@triton.jit(do_not_specialize=["stride", "width", "count"], do_not_specialize_on_alignment=[*_COLUMNS, "token_map"])
def guess_kernel(
    logits,
    peaks,
    places,
    numbers,
    reals,
    integers,
    quotas,
    out,
    token_map,
    count,
    stride,
    width,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    QUOTAS: tl.constexpr,
    MAPPED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """out [rows, 1 + 2 * COUNT], float64: the least logit that is kept; so many tokens, the greatest score first; and
    their chances: of the first that of all that is kept, of the others the softmax of the scores. Grid: [rows].

    As choose_kernel, in coupled mode. A row that is not sampled has its logits as scores. MAPPED: token_map has the
    token id of each logit.
    """
    row, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, BLOCK)
    top, token, _state = _likeliest(peaks, places, row, blocks, BLOCKS)
    values, peaks, to = logits + row * stride, peaks + row * blocks, out + row * (1 + 2 * COUNT)
    low, temperature, key, noisy = _ordered(float("-inf") + 0 * top), 1.0 + 0 * top.to(tl.float64), 0 * row, row < 0
    if SAMPLED:
        number = tl.load(numbers + row)
        if number >= 0:
            temperature, key = tl.load(reals + number), tl.load(integers + count + number)
            low, _sure, _above = _floor(values, peaks, top, reals + number, integers + number, count, width, BLOCK)
            _score, token, _alone = _noisiest(
                values, peaks, top, temperature, key, low, quotas, token_map, width, BLOCK, False, QUOTAS, MAPPED
            )
            noisy = number >= 0
    inverse = (1.0 / temperature).to(tl.float32)
    _kept, mass = _from_one(values, peaks, width, top, inverse, low, BLOCK)
    weight = tl.exp((tl.load(values + token).to(tl.float32) - top) * inverse)
    tl.store(to, _number(low).to(tl.float64))
    tl.store(to + 1, _named(token_map, token, MAPPED).to(tl.float64))
    tl.store(to + 1 + COUNT, weight.to(tl.float64) / mass)
    first, last, last_token = token, top + float("inf"), token * 0 - 1
    for place in range(1, COUNT):
        last, last_token, total = _next(
            values, peaks, top, inverse, key, low, noisy, first, last, last_token, token_map, width, BLOCK, MAPPED
        )
        tl.store(to + 1 + place, _named(token_map, last_token, MAPPED).to(tl.float64))
        tl.store(to + 1 + COUNT + place, tl.exp(last).to(tl.float64) / total)


@triton.jit
def _named(token_map, token, MAPPED: tl.constexpr):
    return tl.load(token_map + token) if MAPPED else token


@triton.jit
def _next(
    values,
    peaks,
    top,
    inverse,
    key,
    low,
    noisy,
    first,
    last,
    last_token,
    token_map,
    width,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Of all tokens from the floor on but the first, the one that comes after the last: its score in float32, and it;
    and the sum of the exponentials of all scores. Without one the score is -inf."""
    # Of each lane: lanes are joined once, at the end.
    best, token, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for block in range(tl.cdiv(width, BLOCK)):
        if _ordered(tl.load(peaks + block)) >= low:
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < width, other=float("-inf")).to(tl.float32)
            score = tl.where((_ordered(x) >= low) & (at < width), (x - top) * inverse, float("-inf"))
            if noisy:
                named = tl.load(token_map + at, mask=at < width, other=0) if MAPPED else at
                score += _noise(_mixed(named, key))
            total += tl.exp(score)
            after = (score < last) | ((score == last) & (at > last_token))
            score = tl.where(after & (at != first), score, float("-inf"))
            token = tl.where(score > best, at, token)
            best = tl.maximum(score, best)
    score, found = _winner(best, token)
    return score, found, tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def _floor(values, peaks, top, reals, integers, count, width, BLOCK: tl.constexpr):
    """The least logit that is kept, as an integer; whether that is sure; and what may weigh more than a token that is
    kept for sure, at most, in float64. Less than nothing where that does not tell."""
    temperature, top_p, top_k = tl.load(reals), tl.load(reals + count), tl.load(integers)
    log_min_p, inverse = tl.load(reals + 2 * count), (1.0 / temperature).to(tl.float32)
    wide_top = top.to(tl.float64) / temperature
    low, sure, most_above = _ordered(float("-inf") + 0 * top), top == top, top_p + float("inf")
    if top_k < width:
        least = top_k.to(tl.int32)
        low, over = _search(values, peaks, width, top, inverse, low, width, least, 0 * top_p, BLOCK, TRIED)
    if top_p < 1:
        # All tokens below this weigh less than top-p leaves out.
        reach = (tl.log(width.to(tl.float64) / (1 - top_p)) + 1) * temperature
        start = tl.maximum(low, _ordered(top - reach.to(tl.float32)))
        counts, masses = _from(values, peaks, width, top, inverse, tl.where(tl.arange(0, 2) == 0, low, start), BLOCK)
        kept, mass, low = tl.min(counts, axis=0), tl.max(masses, axis=0), start
        # Where the sums do not tell, one token more is kept here.
        most_above, wanted = top_p * mass * (1 - _MASS_ERROR), top_p * mass * (1 + _MASS_ERROR)
        sure = wanted < mass
        if sure:
            low, over = _search(values, peaks, width, top, inverse, low, kept, 0 * kept, wanted, BLOCK, TRIED)
            sure = over < most_above
    near = _ordered(_number(low) - (temperature * _TIE).to(tl.float32))
    if near < low:
        counts, masses = _from(values, peaks, width, top, inverse, tl.where(tl.arange(0, 2) == 0, near, low), BLOCK)
        if tl.max(counts, axis=0) > tl.min(counts, axis=0):
            sure, most_above = top != top, -1.0 + 0 * top_p
    beyond = low
    if log_min_p > _NO_MIN_P:
        # Its edge, exactly, is between two of these numbers.
        edge = _ordered(((wide_top + log_min_p) * temperature).to(tl.float32)) + tl.arange(0, 64) - 32
        passes = _number(edge).to(tl.float64) / temperature - wide_top >= log_min_p
        beyond = tl.min(tl.where(passes, edge, _ordered(top)), axis=0)
        if (tl.max(tl.where(passes, 0, 1), axis=0) == 0) | (tl.max(tl.where(passes, 1, 0), axis=0) == 0):
            sure, most_above = top != top, -1.0 + 0 * top_p
    return tl.maximum(low, beyond), sure, most_above


@triton.jit
def _sample(
    values,
    peaks,
    top,
    reals,
    integers,
    quotas,
    count,
    width,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    QUOTAS: tl.constexpr,
):
    temperature, key = tl.load(reals), tl.load(integers + count)
    inverse, wide_top = (1.0 / temperature).to(tl.float32), top.to(tl.float64) / temperature
    low, sure, most_above = _floor(values, peaks, top, reals, integers, count, width, BLOCK)
    score, token, alone = _noisiest(
        values, peaks, top, temperature, key, low, quotas, quotas, width, BLOCK, RATIO, QUOTAS, False
    )
    if RATIO:
        bound = tl.load(reals + 3 * count)
        if bound < float("inf"):
            drafted = tl.load(integers + 2 * count)
            _kept, mass = _from_one(values, peaks, width, top, inverse, low, BLOCK)
            # Where the last tokens are not sure, at least top-p's share is kept, before min-p.
            least, most = tl.where(sure, mass * (1 - _MASS_ERROR), most_above), mass * (1 + _MASS_ERROR)
            alone = alone & (sure | (tl.load(reals + 2 * count) < _NO_MIN_P))
            weight = tl.sum(_weights(values, drafted + tl.arange(0, 1), low, temperature, wide_top), axis=0)
            if bound * most < weight:
                token, alone = drafted.to(tl.int32), top == top
            else:
                alone = alone & (bound * least >= weight)
                named = tl.arange(0, QUOTAS)
                ids, shares = tl.load(quotas + named), tl.load(quotas + QUOTAS + named).to(tl.float64) / 65536
                weights = _weights(values, ids, low, temperature, wide_top)
                noise = _exact_noise(_mixed(ids, key))
                # Linear in the mass: what is chosen at both ends of what it may be is chosen between.
                score_most, token_most = _winner(tl.log(tl.maximum(weights - shares * most, 0.0)) + noise, ids)
                score_least, token_least = _winner(tl.log(tl.maximum(weights - shares * least, 0.0)) + noise, ids)
                other = token
                token = tl.where(score_most > score, token_most.to(tl.int32), other)
                alone = alone & (token == tl.where(score_least > score, token_least.to(tl.int32), other))
                # With nothing left p = q up to rounding.
                alone = alone & (tl.maximum(score, score_most) > float("-inf"))
    if sure == 0:
        # Whatever top-p keeps exactly, it keeps what less than its share is above.
        chosen = _ordered(tl.load(values + token).to(tl.float32))
        _more, mass_above = _from_one(values, peaks, width, top, inverse, chosen + 1, BLOCK)
        sure = mass_above < most_above
    return token, tl.where(sure & alone, SURE, UNSURE)


@triton.jit
def _weights(values, tokens, low, temperature, wide_top):
    """float64: what tokens weigh, 0 below the floor."""
    x = tl.load(values + tokens, mask=tokens >= 0, other=float("-inf")).to(tl.float32)
    return tl.where(_ordered(x) >= low, tl.exp(x.to(tl.float64) / temperature - wide_top), 0.0)


@triton.jit
def _noisiest(
    values,
    peaks,
    top,
    temperature,
    key,
    low,
    quotas,
    token_map,
    width,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    QUOTAS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """The greatest scaled logit + G in float64 of the tokens from the floor on, without those of q; its token; and
    whether no lane has had two that may win."""
    inverse, wide_top = (1.0 / temperature).to(tl.float32), top.to(tl.float64) / temperature
    # Of each lane: lanes are joined once, at the end.
    best, token = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    second = best
    for block in range(tl.cdiv(width, BLOCK)):
        if _ordered(tl.load(peaks + block)) >= low:
            at = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(values + at, mask=at < width, other=float("-inf")).to(tl.float32)
            named = tl.load(token_map + at, mask=at < width, other=0) if MAPPED else at
            kept = (_ordered(x) >= low) & (at < width)
            if RATIO:
                for number in range(QUOTAS):
                    kept = kept & (at != tl.load(quotas + number))
            rough = tl.where(kept, (x - top) * inverse + _noise(_mixed(named, key)), float("-inf"))
            second = tl.maximum(second, tl.minimum(best, rough))
            token = tl.where(rough > best, at, token)
            best = tl.maximum(best, rough)
    may_win = (best >= tl.max(best, axis=0) - 2 * _SCORE_ERROR) & (best > float("-inf"))
    sure = tl.max(second, axis=0) < tl.max(best, axis=0) - 2 * _SCORE_ERROR
    x = tl.load(values + token, mask=may_win, other=float("-inf")).to(tl.float64)
    named = tl.load(token_map + token, mask=may_win, other=0) if MAPPED else token
    exact = tl.where(may_win, x / temperature - wide_top + _exact_noise(_mixed(named, key)), float("-inf"))
    score, first = _winner(exact, token)
    return score, first, sure | (score == float("-inf"))
