"""What a head keeps: of cached prefixes, whole or not at all, by salt, within a bound; of texts without drafts."""

from __future__ import annotations

import random

import pytest
import torch
from outrider.drafting.source import Seen
from outrider.heads.features import BLOCK, FeatureCache, FeatureWriter
from outrider.heads.remote import HeadFeatures
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import PLAIN, Speculation

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


def test_a_text_whose_drafts_stay_off_keeps_few_states_and_its_head_begins_anew_where_they_are_on_again() -> None:
    tokens, key, on = list(range(400)), SequenceKey(0, 1), Speculation(4)
    spec = SequenceSpec((0,), SamplingParams(temperature=0.0), VerificationMode.GREEDY, speculation=on)
    features = HeadFeatures("mtp", ())

    def seen(at: int) -> list[tuple[int, int, bool]]:
        found = features.see([Seen(key, at, torch.full((1, WIDTH), float(at)))])
        return [(its.start, len(its.rows) // (2 * WIDTH), its.first) for _, its in found]

    features.open(key, spec, tokens)
    assert seen(0) == [(0, 1, True)]
    features.limit(key, PLAIN)
    assert [seen(at) for at in range(1, 21)] == [[]] * 20
    features.limit(key, on)
    assert [start for start, _, _ in seen(21)] == list(range(1, 22)), "what was held comes without a gap"
    features.limit(key, PLAIN)
    assert [seen(at) for at in range(22, 322)] == [[]] * 300
    assert not features._shown[key].held
    features.limit(key, on)
    assert seen(322) == [(322, 1, True)]
    assert seen(323) == [(323, 1, False)]
