"""Ratio mode with n-grams and a model in turns: what was drawn is judged by what it was drawn from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from outrider.drafters import (
    CombinedDrafter,
    ModelConfig,
    ModelDrafter,
    NgramDrafter,
)
from outrider.drafting.buffer import DraftBuffer
from outrider.drafting.lookup.ngram import NgramConfig
from outrider.drafting.source import DraftLimits, Opening
from outrider.drafting.tree import DraftTree
from outrider.speculation import Candidate, SamplingParams, VerificationMode, verify

from benchmarks.support.chain_model import ChainEngine

VOCAB = 12
CHOICE, A, B, C = 5, 6, 7, 8
CAPACITY = 8


def logits() -> torch.Tensor:
    """0 to 5 follow one another for certain; after 5 come A, B and C, equally likely, and then 0 again."""
    table = torch.full((VOCAB, VOCAB), -math.inf)
    for token in range(VOCAB):
        table[token, 0 if token > CHOICE else token + 1] = 0.0
    table[CHOICE] = -math.inf
    table[CHOICE, [A, B, C]] = 0.0
    return table


@pytest.fixture
def drafter() -> CombinedDrafter:
    engine = ChainEngine(logits(), num_blocks=64, max_context_len=256)
    match = NgramConfig(min_match=2, max_match=2)
    return CombinedDrafter(NgramDrafter(VOCAB, 256, match), ModelDrafter(engine, ModelConfig(min_confidence=0.0)))


# An earlier "3 4 5" went on with A, and a later "4 5" with B: after 3 4 a match says A, and after 4 5 it says B.
HISTORY = [3, 4, 5, A, 9, 4, 5, B, 10, 1]


def judged(drafter: CombinedDrafter, seed: int) -> int:
    """What is said after 5, where the target says 2, 3, 4 and 5 itself while all that is drafted is on its way."""
    params = SamplingParams(temperature=1.0, seed=seed)
    sequence = drafter.open(Opening(HISTORY, params, VerificationMode.RATIO, limits=DraftLimits(5), max_new_tokens=6))
    said: list[DraftTree] = []
    for token in (2, 3, 4, 5):
        [drafted] = drafter.draft([sequence])
        assert drafted is not None
        said.append(replace(drafted, epoch=sequence.epoch))
        drafter.commit(sequence, sequence.committed_len, [token])
    [drafted] = drafter.draft([sequence])
    assert drafted is not None
    said.append(replace(drafted, epoch=sequence.epoch))
    buffer = DraftBuffer()
    for draft in said:
        buffer.offer(draft, sequence.tokens, CAPACITY)
    [tree] = buffer.trees
    candidate = Candidate(params, VerificationMode.RATIO, sequence.committed_len, tree.token_ids[:1], tree.q[:1])
    rows = logits()[[CHOICE, *tree.token_ids[:1]]]
    [verdict] = verify(rows, [candidate])
    drafter.close(sequence)
    return verdict.token_ids[0]


def test_a_match_that_begins_with_a_drawn_token_does_not_change_how_often_it_is_said(drafter: CombinedDrafter) -> None:
    count = 1500
    said = Counter(judged(drafter, seed) for seed in range(count))
    # Six standard deviations of a third.
    assert all(abs(said[token] / count - 1 / 3) < 0.075 for token in (A, B, C)), said
