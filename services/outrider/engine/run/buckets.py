"""The step shapes for which graphs are captured. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

DRAFT_TIERS = (0, 1, 2, 3, 5, 7)
"""Draft tokens per row that the policy chooses from. Other counts run in the next larger bucket."""

MIN_TOKENS = 16
"""Buckets are multiples of this many tokens, the smallest tile of tensor cores: one token costs as much as sixteen. And
as products of one shape sum in one order, a token's logits get the same bits whether verified or decoded."""


class Bucket(NamedTuple):
    """A captured step: runs any step of at most this many tokens in at most this many rows."""

    tokens: int
    rows: int


def make_buckets(max_rows: int, max_tokens: int, min_tokens: int = MIN_TOKENS) -> tuple[Bucket, ...]:
    """Those that fit max_tokens, ascending: one for every tier and every power of two of rows up to max_rows; above, at
    twice as many rows and tokens each."""
    if max_rows < 1 or min_tokens < 1:
        raise ValueError("max_rows and min_tokens: must be at least 1")
    found = set()
    for rows in _powers_up_to(max_rows):
        for tier in DRAFT_TIERS:
            tokens = -(-rows * (tier + 1) // min_tokens) * min_tokens
            if tokens <= max_tokens or rows * (tier + 1) <= max_tokens < tokens:
                found.add(Bucket(min(tokens, max_tokens), rows))
    rows = max_rows
    while rows < max_tokens:
        rows = min(2 * rows, max_tokens)
        tokens = min(-(-rows // min_tokens) * min_tokens, max_tokens)
        found.add(Bucket(tokens, rows))
        while tokens < max_tokens:
            tokens = min(2 * tokens, max_tokens)
            found.add(Bucket(tokens, rows))
    return tuple(sorted(found))


def choose(buckets: Sequence[Bucket], rows: int, tokens: int) -> Bucket | None:
    """The bucket with the fewest tokens, then rows, that holds the step; None when none does. Buckets ascend."""
    for bucket in buckets[bisect_left(buckets, (tokens, 0)) :]:
        if bucket.rows >= rows:
            return bucket
    return None


def _powers_up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    powers = [1 << n for n in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]
