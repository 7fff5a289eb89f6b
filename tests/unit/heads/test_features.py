"""What a head keeps of cached prefixes: found whole or not at all, under its salt, and within a bound."""

from __future__ import annotations

import random

import pytest
import torch
from outrider.heads.features import BLOCK, FeatureCache, FeatureWriter

WIDTH = 4


def known(
    tokens: list[int], *steps: int, begin: int = 0, salt: bytes = b"", cache: FeatureCache | None = None
) -> FeatureCache:
    """A sequence that is seen in steps of so many positions from `begin` on; feature t is t in all its numbers."""
    cache = cache or FeatureCache()
    writer, at = FeatureWriter(cache, salt), begin
    for count in steps:
        writer.add(tokens, at, torch.arange(at, at + count).float()[:, None].repeat(1, WIDTH))
        at += count
    return cache


@pytest.mark.parametrize("seed", range(5))
def test_features_are_found_however_the_steps_were_cut(seed: int) -> None:
    rng = random.Random(seed)
    tokens, steps = [rng.randrange(9) for _ in range(100)], []
    while sum(steps) < 100:
        steps.append(min(rng.choice((1, 2, 3, 30)), 100 - sum(steps)))
    cache = known(tokens, *steps)
    for end in range(BLOCK, 97, BLOCK):
        found = cache.find(tokens, b"", end)
        assert found is not None and found[:, 0].tolist() == list(range(end))


def test_nothing_is_found_of_another_text_or_salt_or_of_half_a_block() -> None:
    tokens = list(range(40))
    cache = known(tokens, 40, salt=b"a")
    assert cache.find(tokens, b"a", 40) is not None
    assert cache.find(tokens, b"b", 40) is None and cache.find([1, *tokens[1:]], b"a", 40) is None
    assert cache.find(tokens, b"a", 39) is None and cache.find(tokens, b"a", 0) is None


def test_after_a_gap_what_follows_is_kept_beside_what_was_known() -> None:
    tokens = list(range(64))
    cache = known(tokens, 24)
    known(tokens, 30, begin=24, cache=cache)
    found = cache.find(tokens, b"", 48)
    assert found is not None and found[:, 0].tolist() == list(range(48))
    # A gap that ends within a block leaves that block unknown.
    other = known(tokens, 16)
    known(tokens, 30, begin=18, cache=other)
    assert other.find(tokens, b"", 16) is not None and other.find(tokens, b"", 48) is None


def test_positions_whose_tokens_are_not_known_yet_wait() -> None:
    cache = FeatureCache()
    writer, tokens = FeatureWriter(cache, b""), list(range(BLOCK - 2))
    writer.add(tokens, 0, torch.zeros(BLOCK, WIDTH))
    assert not cache.num_bytes
    tokens += [70, 80, 90]
    writer.add(tokens, BLOCK, torch.zeros(1, WIDTH))
    assert cache.find(tokens, b"", BLOCK) is not None


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    block = BLOCK * WIDTH * 4
    texts = [[number] * 2 * BLOCK for number in range(5)]
    cache = FeatureCache(most_bytes=4 * block)
    for text in texts[:2]:
        known(text, 2 * BLOCK, cache=cache)
    assert cache.find(texts[0], b"", 2 * BLOCK) is not None
    known(texts[2], 2 * BLOCK, cache=cache)
    assert cache.num_bytes == 4 * block and cache.find(texts[0], b"", 2 * BLOCK) is not None
    assert cache.find(texts[1], b"", 2 * BLOCK) is None
