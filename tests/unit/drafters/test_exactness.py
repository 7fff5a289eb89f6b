"""In ratio mode, ending a proposal early leaves the target's distribution as it is."""

from __future__ import annotations

from collections import Counter

import torch
from outrider.drafters.rounds import DraftChain
from outrider.speculation import Candidate, Proposal, SamplingParams, VerificationMode, propose
from outrider.tree import DraftTree
from scipy.stats import chisquare

from tests.judged import verify

# The fault shows in so few with p < 1e-60.
DRAWS = 3000
DRAFT_LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5])
TARGET_LOGITS = torch.tensor([1.2, 1.5, 0.4, 0.3, 0.2])


class WithholdingChain(DraftChain):
    """The fault: an unlikely draw is kept from the verifier."""

    def add(self, proposal: Proposal) -> None:
        if proposal.confidence >= self.min_confidence:
            super().add(proposal)


def p_value(kind: type[DraftChain]) -> float:
    """Of the first token's frequencies over many seeds, under the target's own distribution."""
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(DRAWS)]
    mode = VerificationMode.RATIO
    proposals = propose(DRAFT_LOGITS.expand(DRAWS, -1), params, [mode] * DRAWS, [7] * DRAWS)
    candidates = []
    for settings, proposal in zip(params, proposals, strict=True):
        chain = kind(DraftTree(7), wanted=1, min_confidence=0.3)
        chain.add(proposal)
        candidates.append(Candidate(settings, mode, DraftTree(7, tuple(chain.token_ids), q=tuple(chain.q))))
    rows = sum(candidate.num_rows for candidate in candidates)
    seen = Counter(verdict.token_ids[0] for verdict in verify(TARGET_LOGITS.expand(rows, -1), candidates))
    expected = torch.softmax(TARGET_LOGITS.double(), 0)
    return float(chisquare([seen[i] for i in range(5)], expected * DRAWS).pvalue)


def test_a_chain_that_ends_early_does_not_bend_the_distribution() -> None:
    assert p_value(DraftChain) > 0.01


def test_and_the_same_test_finds_a_chain_that_withholds_unlikely_draws() -> None:
    assert p_value(WithholdingChain) < 1e-6
