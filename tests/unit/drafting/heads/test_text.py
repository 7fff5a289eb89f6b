"""A head's draft as it grows: which tokens it has, and where each comes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from outrider.drafting.heads.runner import HeadRunner
from outrider.drafting.heads.text import GrowingDraft, Place
from outrider.drafting.source import SourceOpening
from outrider.drafting.tree import ROOT, DraftTree
from outrider.protocol.limits import MAX_TREE_TOKENS
from outrider.speculation import Proposal, SamplingParams, VerificationMode

from benchmarks.support.chain_model import ChainHead


def test_alternatives_are_proposed_down_to_the_chance_at_which_targets_verify_them() -> None:
    draft = GrowingDraft(10, frozenset(), Place(torch.zeros(1, 4), torch.zeros(1, 8)))
    draft.add(Proposal(1, 0.5, others=((2, 0.03), (3, 0.01))))
    draft.add(Proposal(4, 0.6, others=((5, 0.05), (6, 0.03))))
    tree = draft.tree("mtp")
    # 6 has 0.5 · 0.03.
    assert (tree.token_ids, tree.parents) == ((1, 2, 4, 5), (-1, -1, 0, 0))


def drafted(most: int) -> DraftTree:
    """By a head that is sure of one token in ten times as much as of each of eight others."""
    logits = torch.full((16, 16), -30.0)
    logits[:, :8], logits[:, 8] = 0.0, torch.tensor(40.0).log()
    runner = HeadRunner(ChainHead(logits), None)
    opening = SourceOpening([1, 2, 3], SamplingParams(temperature=0.0), VerificationMode.GREEDY)
    text = runner.open(opening, [1, 2, 3])
    runner.see(text, 0, torch.zeros(2, 1))
    runner.read([text])
    [tree] = runner.draft([text], [most])
    return tree


@pytest.mark.parametrize(("most", "alternatives"), [(5, 6), (64, 3)])
def test_a_token_has_as_many_alternatives_as_a_message_holds(most: int, alternatives: int) -> None:
    tree = drafted(most)
    beside = Counter(tree.parent(node) for node in range(len(tree)))
    assert max(beside.values()) == beside[ROOT] == 1 + alternatives
    assert most * (1 + alternatives) <= MAX_TREE_TOKENS
