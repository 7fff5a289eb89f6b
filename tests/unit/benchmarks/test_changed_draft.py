"""A changed draft is changed in the way it says, and in nothing else."""

from __future__ import annotations

import pytest
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.tree import DraftTree

from benchmarks.support import changed_draft
from benchmarks.support.changed_draft import BadDrafter, stalling, wrong
from tests.ngram_drafter import NgramDrafter

TEXT = [20, 21, 22, 23, 20, 21, 22, 23, 20, 21]
OPENING = SequenceSpec(
    TEXT, speculation=Speculation(4), params=SamplingParams(temperature=0), mode=VerificationMode.GREEDY
)


def test_a_wrong_draft_says_as_much_and_never_what_was_meant() -> None:
    good, bad = NgramDrafter(), BadDrafter(NgramDrafter(), wrong(384))
    (meant,), (said,) = good.draft([good.open(OPENING)]), bad.draft([bad.open(OPENING)])
    assert meant is not None and said is not None
    assert len(said.token_ids) == len(meant.token_ids) > 0
    assert all(a != b for a, b in zip(said.token_ids, meant.token_ids, strict=True))
    assert bad.info == good.info


def test_nor_does_it_name_beside_its_guess_what_was_meant() -> None:
    meant = DraftTree(9, (5, 383, 6, 383), (-1, 0, -1, 0), (0.5, 0.5, 0.3, 0.2), source="model")
    said = wrong(384)(meant)
    assert (said.token_ids, said.parents, said.chances) == ((6, 0, 7, 0), meant.parents, meant.chances)


def test_a_stalling_draft_says_the_same_only_late(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(changed_draft.time, "sleep", slept.append)
    drafted = DraftTree(9, (1, 2), source="ngram")
    assert all(stalling(drafted) is drafted for _ in range(400))
    assert 20 < len(slept) < 90 and set(slept) == {changed_draft.STALL_S}
