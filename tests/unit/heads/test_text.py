"""A head's draft as it grows: which tokens it has, and where each comes."""

from __future__ import annotations

import torch
from outrider.heads.text import GrowingDraft, Place
from outrider.speculation import Proposal


def test_alternatives_are_proposed_down_to_the_chance_at_which_targets_verify_them() -> None:
    draft = GrowingDraft(10, frozenset(), Place(torch.zeros(1, 4), torch.zeros(1, 8)), 0.25)
    draft.add(Proposal(1, 0.5, others=((2, 0.03), (3, 0.01))))
    draft.add(Proposal(4, 0.6, others=((5, 0.05), (6, 0.03))))
    tree = draft.tree("mtp")
    # 6 has 0.5 · 0.03.
    assert (tree.token_ids, tree.parents) == ((1, 2, 4, 5), (-1, -1, 0, 0))
